/** Limits over all pods: who uses them, who waits, and how to change them. */

import { get, may, mayNot, poll, send } from "./api.js";
import { asking, count, duration, fill, h, many, put, said, visible } from "./dom.js";
import { meter } from "./sums.js";

const MOST = 10000; // that are counted

export function limitsView({ fail }) {
  const rows = new Map();
  const body = h("tbody");
  const empty = h("div");
  const head = ["Limit", "In use", "Waiting", "Rate", "Said by", "At once"].map((name) => h("th", { scope: "col" }, name));
  const table = h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, head)), body));

  const look = poll(async () => {
    const { limits } = await get("limits");
    for (const limit of limits) {
      if (!rows.has(limit.name)) {
        rows.set(limit.name, row(limit, () => look.soon()));
        body.append(rows.get(limit.name).element);
      }
      rows.get(limit.name).show(limit);
    }
    for (const [name, { element }] of rows) if (!limits.some((limit) => limit.name === name)) { element.remove(); rows.delete(name); }
    table.hidden = !limits.length;
    fill(empty, String(limits.length), limits.length ? [] : h("div", { class: "empty" }, h("p", {}, "No limit has been declared or set. In a handler: "), h("p", {}, h("code", {}, 'async with job.limit("parser", 2):')), h("p", {}, "or over a kind: ", h("code", {}, "@engine.job(limit=10)"))));
  }, 2, fail);

  return {
    element: h("section", { "data-ready": "" }, h("h1", {}, "Limits"), h("p", { class: "quiet" }, "Each holds over all workers together. A change takes effect at once; what runs goes on."), table, empty),
    stop: look.stop,
  };
}

function row({ name }, soon) {
  const kind = name.startsWith("kind:") && name.slice(5);
  const [use, waiting, rate, who, answer] = [h("td"), h("td", { class: "figures" }), h("td", { class: "figures" }), h("td"), h("div", { role: "status" })];
  const most = h("input", { type: "number", min: 0, max: 2147483647, "aria-label": `How many at once: ${visible(name)}` });
  const set = h("button", {}, "Set");
  const form = h("form", { class: "filters", onsubmit: (e) => { e.preventDefault(); change("PUT", { concurrency: most.value === "" ? null : Number(most.value) }); } }, most, set);

  async function change(method, value) {
    try {
      await send(method, `limits/${encodeURIComponent(name)}`, value);
      fill(answer, "");
      soon();
    } catch (error) {
      fill(answer, error.message, said(error.message, "span", { class: "bad" }));
    }
  }

  return {
    element: h("tr", {}, h("td", {}, kind ? ["children of ", said(kind, "b")] : said(name, "b")), use, waiting, rate, who, h("td", {}, form, answer)),
    show(limit) {
      most.title = set.title = mayNot("operate");
      most.disabled = set.disabled = !may("operate");
      const share = limit.concurrency ? Math.min(100, Math.floor((limit.in_use * 100) / limit.concurrency)) : 0;
      fill(use, `${limit.in_use} ${limit.concurrency}`, h("span", { class: "figures" }, limit.concurrency === null ? count(limit.in_use) : `${count(limit.in_use)} of ${count(limit.concurrency)}`),
        limit.concurrency > 0 && meter(share, `${visible(name)}: ${share} percent in use`));
      put(waiting, limit.waiting >= MOST ? `${count(MOST)} or more` : limit.waiting ? count(limit.waiting) : "");
      put(rate, [limit.requests_per_minute && `${count(limit.requests_per_minute)} a minute`, limit.weight_per_minute && `weight ${count(limit.weight_per_minute)} a minute`,
        limit.per_partition !== null && `${many(limit.per_partition, "of each partition", "of each partition")}`, limit.next_seconds > 0 && `next in ${duration(limit.next_seconds)}`].filter(Boolean).join(" · "));
      fill(who, limit.set_by, { code: "the code", operator: "an operator", nobody: "nobody" }[limit.set_by],
        limit.set_by === "operator" && may("operate") && [" ", asking("Reset", "What the code says holds again.", async () => { await change("DELETE"); return "reset"; })]);
      if (document.activeElement !== most) most.value = limit.concurrency ?? "";
    },
  };
}
