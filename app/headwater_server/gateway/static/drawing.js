// A drawing: strokes of points in a unit square, and the pixels that a model gets.

const FINE = 8; // each pixel is the mean of FINE by FINE finer pixels

/** The points of an arc in the unit square; angles are in turns, clockwise from the right. */
function arc(x, y, rx, ry, from, to, steps = 24) {
  return Array.from({ length: steps + 1 }, (_, index) => {
    const angle = 2 * Math.PI * (from + ((to - from) * index) / steps);
    return [x + rx * Math.cos(angle), y + ry * Math.sin(angle)];
  });
}

/** Strokes of each digit as in handwriting. */
export const DIGITS = [
  [arc(0.5, 0.5, 0.26, 0.4, -0.25, 0.75)],
  [[[0.34, 0.3], [0.54, 0.1], [0.54, 0.9]]],
  [[...arc(0.5, 0.32, 0.24, 0.22, -0.5, 0.1), [0.26, 0.9], [0.78, 0.9]]],
  [[...arc(0.48, 0.3, 0.22, 0.2, -0.45, 0.25, 16), ...arc(0.48, 0.7, 0.25, 0.2, -0.25, 0.42, 16)]],
  [[[0.52, 0.1], [0.24, 0.58], [0.8, 0.58]], [[0.62, 0.38], [0.56, 0.9]]],
  [[[0.74, 0.1], [0.34, 0.1], [0.32, 0.46], ...arc(0.48, 0.66, 0.24, 0.24, -0.32, 0.4)]],
  [[[0.62, 0.1], [0.42, 0.28], [0.32, 0.5], ...arc(0.52, 0.68, 0.21, 0.22, -0.5, 0.5)]],
  [[[0.28, 0.12], [0.72, 0.12], [0.48, 0.9]], [[0.36, 0.5], [0.76, 0.5]]],
  [[...arc(0.5, 0.3, 0.19, 0.2, 0.25, 1.25), ...arc(0.5, 0.7, 0.22, 0.2, -0.25, 0.75)]],
  [[...arc(0.5, 0.32, 0.21, 0.22, 0, 1), [0.7, 0.5], [0.64, 0.72], [0.5, 0.9]]],
];

/** Draw strokes; points are first moved, then multiplied by the scale. */
export function trace(context, strokes, scale, width, [dx, dy] = [0, 0]) {
  context.lineWidth = width;
  context.lineCap = context.lineJoin = "round";
  context.beginPath();
  for (const stroke of strokes) {
    stroke.forEach(([x, y], index) => {
      const at = [(x + dx) * scale, (y + dy) * scale];
      if (index) context.lineTo(...at);
      else context.moveTo(...at);
    });
    if (stroke.length === 1) context.lineTo((stroke[0][0] + dx) * scale + 0.01, (stroke[0][1] + dy) * scale);
  }
  context.stroke();
}

/**
 * The pixels of a drawing, 0 to 1, rows from the top. The drawing is centred and scaled to the image's height, as the
 * images of handwriting are that models are trained on.
 */
export function rasterise(strokes, [height, width]) {
  const canvas = document.createElement("canvas");
  canvas.width = width * FINE;
  canvas.height = height * FINE;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const points = strokes.flat();
  if (points.length) {
    const pen = 0.14;
    const side = Math.min(canvas.width, canvas.height);
    const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
    const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const fit = Math.min(3, (1 - pen) / Math.max(bottom - top, right - left, 0.01));
    const scale = side * fit;
    const move = [canvas.width / 2 / scale - (left + right) / 2, canvas.height / 2 / scale - (top + bottom) / 2];
    trace(context, strokes, scale, side * pen, move);
  }
  const alpha = context.getImageData(0, 0, canvas.width, canvas.height).data;
  return Array.from({ length: height * width }, (_, pixel) => {
    let sum = 0;
    for (let y = 0; y < FINE; y++) {
      for (let x = 0; x < FINE; x++) {
        const at = (Math.floor(pixel / width) * FINE + y) * canvas.width + (pixel % width) * FINE + x;
        sum += alpha[at * 4 + 3];
      }
    }
    return sum / 255 / FINE / FINE;
  });
}
