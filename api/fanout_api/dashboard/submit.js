/** Submit a job of a registered kind: a form made from its JSON schema, or JSON as it is. */

import { get, may, send } from "./api.js";
import { h, put, said, visible } from "./dom.js";

const LIMIT = 1024;

/** Options of a batch that are no plain text. */
const READ = {
  concurrency: Number,
  deadline_seconds: Number,
  fail_after: (text) => (/^\d+$/.test(text) ? Number(text) : text),
  budget: (text) => Object.fromEntries(text.split(/[\s,;]+/).filter(Boolean).map((part) => part.split("=")).map(([name, most]) => [name, Number(most)])),
};

export function submitView({ params, address, fail }) {
  const place = h("div");
  const box = h("section", { "data-ready": "" }, h("h1", {}, "Submit a job"), place);
  if (!may("submit")) place.append(h("p", { class: "notice" }, "Your key may not submit jobs; the server will refuse."));
  get("kinds").then(({ kinds }) => place.append(kinds.length ? form(kinds, params, address) : h("p", { class: "empty" }, "No kind is registered here: this server was started without an app. ", h("code", {}, "fanout up --app yours:engine"))), fail);
  return { element: box };
}

function form(kinds, params, address) {
  const kind = h("select", { id: "k", onchange: () => { address.write({ kind: kind.value }); pick(); } }, kinds.map(({ name }) => h("option", { value: name, selected: name === params.get("kind") }, visible(name))));
  const fields = h("div");
  const raw = h("textarea", { id: "raw", rows: 8, spellcheck: "false", "aria-label": "Payload as JSON", oninput: size });
  const asJson = h("input", { type: "checkbox", id: "as", onchange: turn });
  const [bytes, answer] = [h("span", { class: "figures quiet" }), h("div", { role: "alert" })];
  const more = { key: h("input", { id: "idem", maxlength: 200 }), priority: h("input", { type: "number", min: 0, max: 9, placeholder: "5" }), delay: h("input", { type: "number", min: 0, step: "any" }), max_retries: h("input", { type: "number", min: 0 }) };
  const text = (props) => h("input", { maxlength: 200, ...props });
  const batch = { on_closed: text({ list: "kinds" }), concurrency: h("input", { type: "number", min: 1 }), fail_after: text({ placeholder: "20, or 5 %" }), deadline_seconds: h("input", { type: "number", min: 1, step: "any" }),
    budget: text({ placeholder: "cost=50 tokens=2000000" }), partition: text(), webhook: text(), closing: h("select", {}, h("option", { value: "" }, "the last child, at once"), h("option", { value: "aggregate" }, "a count every 10 s")) };
  let built = null;

  function pick() {
    const { payload_schema: schema } = kinds.find(({ name }) => name === kind.value) ?? {};
    const root = schema ? resolved(schema, schema) : {};
    built = root.properties ? object(root, schema, 0) : null;
    fields.replaceChildren(...(built ? [built.element] : []));
    fields.oninput = size;
    asJson.checked = !built;
    asJson.disabled = !built;
    raw.value = schema ? "{}" : "null";
    turn();
  }

  function turn() {
    fields.hidden = asJson.checked;
    raw.hidden = !asJson.checked;
    if (asJson.checked && built) raw.value = JSON.stringify(built.read() ?? {}, null, 2);
    size();
  }

  const value = () => (asJson.checked ? JSON.parse(raw.value || "null") : built.read());

  function size() {
    let text = "";
    try {
      const length = new TextEncoder().encode(JSON.stringify(value())).length;
      text = `${length} of ${LIMIT} bytes`;
      bytes.classList.toggle("bad", length > LIMIT);
    } catch (error) {
      text = `not JSON yet: ${error.message}`;
    }
    put(bytes, text);
  }

  async function submit(e) {
    e.preventDefault();
    const button = e.target.querySelector("button.main");
    button.disabled = true;
    try {
      const body = { kind: kind.value, payload: value() };
      for (const name of ["priority", "delay", "max_retries"]) if (more[name].value !== "") body[name] = Number(more[name].value);
      for (const [name, { value: given }] of Object.entries(batch)) if (given !== "") body[name] = (READ[name] ?? String)(given);
      const { value: job, status } = await send("POST", "jobs", body, more.key.value ? { "idempotency-key": more.key.value } : {});
      if (status === 201) location.hash = `#/jobs/${job.id}`;
      else answer.replaceChildren(h("p", { class: "notice" }, "This key was used before, for the same: ", h("a", { href: `#/jobs/${job.id}` }, `job ${job.id}`)));
    } catch (error) {
      answer.replaceChildren(h("p", { class: "notice bad" }, error.field && said(`${error.field}: `, "b"), said(error.message)));
    } finally {
      button.disabled = false;
    }
  }

  pick();
  return h("form", { class: "submit", onsubmit: submit }, h("label", { for: "k" }, "Kind"), kind, fields, raw, h("p", { class: "row" }, h("label", {}, asJson, " as JSON"), bytes),
    h("details", {}, h("summary", {}, "Key, priority, delay, retries"), labelled("Idempotency key", more.key, "Submitted again with it, it is the same job."), labelled("Priority", more.priority, "0 first, 9 last"), labelled("Delay in seconds", more.delay), labelled("Retries at most", more.max_retries)),
    h("details", {}, h("summary", {}, "A batch: how many at once, when it fails, what it may cost, what follows"), labelled("Children at once", batch.concurrency, "over all workers"), labelled("Fails after", batch.fail_after, "so many failed children, or such a share"), labelled("Deadline in seconds", batch.deadline_seconds, "what is open then ends as failed"),
      labelled("Budget", batch.budget, "sums of job.add; one that is reached ends the batch"), labelled("Then", batch.on_closed, "the kind of the job that follows its close"), h("datalist", { id: "kinds" }, kinds.map(({ name }) => h("option", { value: name }))),
      labelled("Webhook", batch.webhook, "the endpoint that is told of its close"), labelled("Whose share", batch.partition, "of limits per partition: a customer, for example"), labelled("Closed by", batch.closing)),
    answer, h("button", { class: "main" }, "Submit"));
}

let ids = 0;
function labelled(label, input, help, required) {
  input.id ||= `f${ids++}`;
  const hint = help && said(help, "small", { class: "quiet", id: `${input.id}h` });
  if (hint) input.setAttribute("aria-describedby", hint.id);
  return h("div", { class: "field" }, h("label", { for: input.id }, said(label), required && h("span", { class: "quiet" }, " required")), input, hint);
}

/** Follow $ref, allOf of one, and "this or null". */
function resolved(schema, root) {
  if (schema.$ref) {
    const target = schema.$ref.replace(/^#\//, "").split("/").reduce((at, part) => at?.[part.replace(/~1/g, "/").replace(/~0/g, "~")], root) ?? {};
    return resolved({ ...target, ...schema, $ref: undefined }, root);
  }
  if (schema.allOf?.length === 1) return resolved({ ...schema.allOf[0], ...schema, allOf: undefined }, root);
  const some = (schema.anyOf ?? schema.oneOf ?? []).filter((one) => one.type !== "null");
  if (some.length === 1) return resolved({ ...some[0], ...schema, anyOf: undefined, oneOf: undefined, title: schema.title, nullable: true }, root);
  return schema;
}

function object(schema, root, depth) {
  const required = new Set(schema.required ?? []);
  const parts = Object.entries(schema.properties).map(([name, sub]) => [name, field(name, resolved(sub, root), root, required.has(name), depth)]);
  return {
    element: h(depth ? "fieldset" : "div", {}, depth ? h("legend", {}, said(schema.title ?? "")) : null, parts.map(([, part]) => part.element)),
    read() {
      const entries = parts.map(([name, part]) => [name, part.read()]).filter(([, value]) => value !== undefined);
      return entries.length || depth === 0 ? Object.fromEntries(entries) : undefined;
    },
  };
}

/** One property: { element, read() }; read gives undefined for what is left out. */
function field(name, schema, root, required, depth) {
  const help = [schema.description, !required && schema.default !== undefined && schema.default !== null && `default ${JSON.stringify(schema.default)}`].filter(Boolean).join(" · ");
  const given = (input, read) => ({ element: labelled(name, input, help, required), read: () => (input.value === "" && !required ? undefined : read(input.value)) });
  if (schema.enum || schema.const !== undefined) {
    const values = schema.enum ?? [schema.const];
    const input = h("select", {}, !required && h("option", { value: "" }, ""), values.map((value, i) => h("option", { value: i, selected: value === schema.default }, String(value))));
    return given(input, (i) => values[i]);
  }
  const { type } = schema;
  if (type === "boolean") {
    const input = h("input", { type: "checkbox", checked: schema.default === true });
    return { element: labelled(name, input, schema.description), read: () => (input.checked === (schema.default ?? null) && !required ? undefined : input.checked) };
  }
  if (type === "integer" || type === "number") {
    return given(h("input", { type: "number", step: type === "integer" ? 1 : "any", min: schema.minimum, max: schema.maximum, required }), Number);
  }
  if (type === "string") {
    const input = (schema.maxLength ?? 0) > 200 ? h("textarea", { rows: 3 }) : h("input", { type: schema.format === "date" ? "date" : "text", maxlength: schema.maxLength });
    return given(input, String);
  }
  const item = type === "array" && schema.items ? resolved(schema.items, root) : null;
  if (item && ["string", "integer", "number"].includes(item.type) && !item.enum) {
    const input = h("textarea", { rows: 4, placeholder: "one per line" });
    return given(input, (text) => text.split("\n").filter((line) => line.trim()).map((line) => (item.type === "string" ? line : Number(line))));
  }
  if (schema.properties && depth < 2) return object({ ...schema, title: name }, root, depth + 1);
  const input = h("textarea", { rows: 3, spellcheck: "false", placeholder: "JSON" });
  return given(input, (text) => JSON.parse(text || "null"));
}
