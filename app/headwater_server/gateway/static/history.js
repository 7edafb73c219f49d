// The server's statuses of the last minutes, and rates, means and quantiles between two of them.

const KEPT_S = 180;
const WINDOW_S = 10;

/** Sum histograms: the counts by bucket, and the sum of the measured values. */
function added(histograms) {
  const counts = [];
  let sum = 0;
  for (const one of histograms) {
    one.counts.forEach((value, index) => (counts[index] = (counts[index] ?? 0) + value));
    sum += one.sum;
  }
  return { counts, sum, total: counts.reduce((a, b) => a + b, 0) };
}

function between(before, after) {
  const counts = after.counts.map((value, index) => value - (before.counts[index] ?? 0));
  return { counts, sum: after.sum - before.sum, total: after.total - before.total };
}

/** A quantile of a histogram, interpolated linearly within a bucket; null if it is empty. */
export function quantile({ counts, total }, bounds, part) {
  if (!total) return null;
  let left = part * total;
  for (let index = 0; index < bounds.length; index++) {
    if (counts[index] && left <= counts[index]) {
      const low = index ? bounds[index - 1] : 0;
      return low + ((bounds[index] - low) * left) / counts[index];
    }
    left -= counts[index];
  }
  return bounds[bounds.length - 1];
}

/** Requests that ended because of their clients: with a 4xx status, or cancelled. */
export const byClient = (outcomes) => outcomes.client_error + outcomes.cancelled;

/** Requests that failed: neither ok nor ended by their clients. */
export const failures = (outcomes) =>
  Object.values(outcomes).reduce((total, one) => total + one, 0) - outcomes.ok - byClient(outcomes);

/** Figures of a deployment, or of all deployments together. */
function summed(status, name) {
  const all = status.deployments;
  // A pipeline's requests are counted at the pipeline, its calls at its steps. The counts of a deployment with versions
  // are the sums over its versions.
  const asked = all.filter((one) => (name ? one.name === name : one.part_of === null));
  const calls = all.filter((one) => !one.traffic && (!name || one.name === name || one.part_of === name));
  const sum = (of, what) => of.reduce((total, one) => total + what(one), 0);
  const models = calls.map((one) => one.language_model).filter(Boolean);
  return {
    accepted: sum(asked, (one) => one.accepted),
    ended: sum(asked, (one) => sum(Object.values(one.outcomes), Number)),
    ok: sum(asked, (one) => one.outcomes.ok),
    byClient: sum(asked, (one) => byClient(one.outcomes)),
    failed: sum(asked, (one) => failures(one.outcomes)),
    inFlight: sum(asked, (one) => one.in_flight),
    waiting: sum(calls, (one) => one.waiting),
    seconds: added(asked.map((one) => one.seconds)),
    rows: added(calls.map((one) => one.rows)),
    prompts: sum(models, (one) => one.prompt_tokens),
    cached: sum(models, (one) => one.cached_prompt_tokens),
    tokens: sum(models, (one) => one.generated_tokens),
    active: sum(models, (one) => one.active_sequences),
  };
}

export class History {
  #kept = [];

  get last() {
    return this.#kept[this.#kept.length - 1]?.status;
  }

  /** Add a status. */
  add(status) {
    const time = status.now_s;
    const last = this.last;
    const now = accepted(status); // throws before an unreadable status is kept
    // Counts that went down belong to a restarted server, whose clock may also have been set back.
    if (last && (time <= last.now_s || now < accepted(last))) this.#kept = [];
    this.#kept.push({ time, status });
    while (time - this.#kept[0].time > KEPT_S + WINDOW_S) this.#kept.shift();
  }

  /** The figures of the last seconds, and the current values; null before the second status. */
  now(name) {
    return this.#figures(this.#kept.length - 1, name, new Map());
  }

  /** Figures for every time, as [seconds ago, figures]. */
  over(name) {
    const cache = new Map();
    const newest = this.last?.now_s ?? 0;
    return this.#kept
      .map(({ time }, index) => [newest - time, this.#figures(index, name, cache)])
      .filter(([ago, figures]) => figures && ago <= KEPT_S);
  }

  #figures(index, name, cache) {
    const summedAt = (at) => {
      if (!cache.has(at)) cache.set(at, summed(this.#kept[at].status, name));
      return cache.get(at);
    };
    const end = this.#kept[index];
    if (!end) return null;
    let first = index;
    while (first > 0 && end.time - this.#kept[first - 1].time <= WINDOW_S) first--;
    const seconds = end.time - this.#kept[first].time;
    if (!seconds) return null;
    const before = summedAt(first);
    const after = summedAt(index);
    const times = between(before.seconds, after.seconds);
    const rows = between(before.rows, after.rows);
    const bounds = end.status.bounds;
    return {
      ok: (after.ok - before.ok) / seconds,
      byClient: (after.byClient - before.byClient) / seconds,
      failed: (after.failed - before.failed) / seconds,
      rate: (after.ended - before.ended) / seconds,
      p50: quantile(times, bounds.seconds, 0.5),
      p99: quantile(times, bounds.seconds, 0.99),
      rows: rows.total ? rows.sum / rows.total : null,
      waiting: after.waiting,
      inFlight: after.inFlight,
      active: after.active,
      tokens: (after.tokens - before.tokens) / seconds,
      cached: after.prompts > before.prompts ? (after.cached - before.cached) / (after.prompts - before.prompts) : null,
    };
  }
}

const accepted = (status) => status.deployments.reduce((total, one) => total + one.accepted, 0);
export const SHOWN_S = KEPT_S;
