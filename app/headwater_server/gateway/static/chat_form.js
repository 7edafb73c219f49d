// The form of a chat's answer: fields for a JSON schema and for tools, and the answer's JSON laid out over lines.

import { parse } from "./api.js";
import { fault, field, make } from "./dom.js";

const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 20},
    "lines": {"type": "integer", "minimum": 0}
  },
  "required": ["name", "lines"],
  "additionalProperties": false
}`;
const TOOLS = `[{
  "type": "function",
  "function": {
    "name": "find_file",
    "parameters": {
      "type": "object",
      "properties": {"path": {"type": "string", "maxLength": 20}},
      "required": ["path"],
      "additionalProperties": false
    }
  }
}]`;

export class ChatForm {
  constructor() {
    this.schema = make("textarea", { rows: "4", class: "code", spellcheck: "false" });
    this.tools = make("textarea", { rows: "4", class: "code", spellcheck: "false" });
    this.choice = make("select", {}, ...["auto", "required"].map((one) => make("option", { value: one }, one)));
    this.element = make(
      "fieldset",
      {},
      make("legend", {}, "Form of the answer"),
      field("JSON schema", this.schema, "Optional: the answer is JSON that matches this schema."),
      field("Tools, as a JSON array", this.tools, "Optional: functions that the answer may call."),
      field("Tool choice", this.choice, "auto: the model may call a tool; required: the model must call a tool."),
      make("div", { class: "examples" }, example("Example schema", this.schema, SCHEMA), example("Example tools", this.tools, TOOLS)),
    );
  }

  get hasSchema() {
    return this.schema.value.trim() !== "";
  }

  /** The request's fields; null if a field is wrong, which then shows its error. */
  fields() {
    const areas = [this.schema, this.tools];
    const [schema, tools] = areas.map(read);
    if (areas.some((area) => area.hasAttribute("aria-invalid"))) return null;
    return {
      ...(schema === undefined ? {} : { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
      ...(tools === undefined ? {} : { tools, tool_choice: this.choice.value }),
    };
  }
}

/** A button that fills a field as if the user typed. */
function example(text, area, value) {
  const use = () => {
    area.value = value;
    area.dispatchEvent(new Event("input", { bubbles: true }));
  };
  return make("button", { type: "button", onclick: use }, text);
}

/** The parsed value of a field; undefined if the field is empty. If it is not JSON, the field shows an error. */
function read(area) {
  let value;
  let wrong = "";
  try {
    if (area.value.trim()) value = parse(area.value);
  } catch (error) {
    wrong = `Expected JSON: ${error.message}`;
  }
  fault(area, wrong);
  return value;
}

/** An answer in progress: its content and tool calls, which are shown as JSON once they are complete. */
export class Answer {
  constructor() {
    this.content = "";
    this.calls = [];
  }

  /** Add the next part. Returns the text of it that the stream shows. */
  take({ content, tool_calls: parts = [] }) {
    let text = content ?? "";
    this.content += text;
    for (const { index, function: said } of parts) {
      if (said.name) {
        text += `${this.content || this.calls.length ? "\n" : ""}${said.name} `;
        this.calls[index] = { name: said.name, text: "" };
      }
      this.calls[index].text += said.arguments ?? "";
      text += said.arguments ?? "";
    }
    return text;
  }

  /** Titles and texts of the parts that should be JSON, laid out; null for a text that is not JSON. */
  parsed(isSchema) {
    const found = this.calls.map(({ name, text }) => [`Call of ${name}`, text]);
    if (isSchema && (this.content || !found.length)) found.unshift(["Answer as JSON", this.content]);
    return found.map(([title, text]) => [title, laidOut(text)]);
  }
}

const PARTS = /"(?:[^"\\]|\\.)*"|([{[])\s*([}\]]?)|[}\]]|[,:]|\s+/g;

/** JSON laid out over lines, with numbers as they were written; null if the text is not JSON. */
export function laidOut(text) {
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  let depth = 0;
  const line = (change) => `\n${"  ".repeat((depth += change))}`;
  return text.replace(PARTS, (part, opening, closing) => {
    if (opening) return closing ? opening + closing : opening + line(1);
    if (part === "}" || part === "]") return line(-1) + part;
    if (part === ",") return part + line(0);
    if (part === ":") return ": ";
    return part[0] === '"' ? part : "";
  });
}
