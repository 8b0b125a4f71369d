/** Children as a table: a page at a time, by key. */

import { get } from "./api.js";
import { badge, count, duration, fill, h, json, put, said, wordOf } from "./dom.js";

const PAGE = 50;

export function tableView(id, { address }) {
  const body = h("tbody");
  const more = h("button", { type: "button", hidden: true, onclick: () => load(true) }, "Load more");
  const note = h("span", { class: "quiet", role: "status" });
  const status = h("select", { "aria-label": "State", onchange: filter }, h("option", { value: "" }, "any state"), ["pending", "processing", "waiting", "completed", "failed", "cancelled"].map((value) => h("option", { value }, wordOf(value))));
  const from = h("input", { type: "search", "aria-label": "From key", placeholder: "from key …", onchange: filter });
  const reason = h("p", { class: "quiet", hidden: true });
  const element = h("div", { class: "table", hidden: true }, h("form", { class: "filters", onsubmit: (e) => e.preventDefault() }, status, from, note), reason,
    h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["State", "Key", "Took", "Tries", "Result or error"].map((name) => h("th", { scope: "col" }, name)))), body)), more);
  const rows = new Map();
  let [next, pages, wanted] = [null, 1, 0];
  const error = () => address.read().params.get("reason");

  function filter() {
    address.write({ status: status.value, from: from.value, reason: status.value === "failed" ? error() : "" });
    restart();
  }

  function restart() {
    pages = 1;
    rows.clear();
    body.replaceChildren();
    load();
  }

  const page = (after, limit) => get(`jobs/${id}/children`, { status: status.value, error: error(), after, limit });

  async function load(onward = false) {
    const turn = ++wanted;
    // The key that was asked for is part of the page; keys above it come after.
    const start = from.value ? before(from.value) : null;
    const found = await page(onward ? next : start, PAGE);
    if (turn !== wanted) return;
    if (onward) pages++;
    for (const child of found.children) body.append(row(child));
    next = found.next;
    say();
  }

  function say() {
    more.hidden = !next;
    put(note, rows.size ? `${count(rows.size)} shown` : "");
    fill(reason, error() ?? "", error() ? ["only with the reason “", said(error()), "” ", h("button", { class: "link", type: "button", onclick: () => { address.write({ reason: "" }); restart(); } }, "all")] : []);
    reason.hidden = !error();
    if (!rows.size) fill(body, "none", h("tr", {}, h("td", { colspan: 5, class: "quiet" }, "No child is like this.")));
    else delete body.dataset.key;
  }

  function row(child) {
    if (!rows.has(child.id)) {
      if (!rows.size) body.replaceChildren();
      rows.set(child.id, h("tr"));
    }
    const took = child.finished_at && child.claimed_at ? duration((Date.parse(child.finished_at) - Date.parse(child.claimed_at)) / 1000) : "";
    const words = child.error ?? child.reason ?? (child.result === null || child.result === undefined ? "" : json(child.result));
    fill(rows.get(child.id), `${child.status} ${child.attempt} ${child.finished_at}`,
      h("td", {}, badge(child.status)), h("td", {}, h("a", { href: `#/jobs/${child.id}` }, said(child.document_key))), h("td", { class: "figures" }, took), h("td", { class: "figures" }, child.attempt || ""),
      h("td", { class: child.error ? "bad words" : "words" }, said(words.slice(0, 160)), words.length > 160 && "…"));
    return rows.get(child.id);
  }

  function read() {
    const { params } = address.read();
    status.value = params.get("status") ?? "";
    from.value = params.get("from") ?? "";
  }

  return {
    element,
    show(on) {
      const was = !element.hidden;
      element.hidden = !on;
      if (on && !was) { read(); restart(); }
    },
    update() {
      read();
      if (!element.hidden) restart();
    },
    /** Rows that are shown change where they are; none moves, and none goes. */
    async refresh() {
      if (pages > 4) return;
      const start = from.value ? before(from.value) : null;
      const found = await page(start, Math.min(200, pages * PAGE));
      for (const child of found.children) {
        const fresh = !rows.has(child.id);
        const element = row(child);
        if (fresh && !status.value && (!next || rows.size < PAGE)) body.append(element);
        else if (fresh && rows.size <= PAGE) body.append(element);
        else if (fresh) rows.delete(child.id);
      }
      next ??= found.next;
      say();
    },
  };
}

/** A key just below this one, for "after" leaves its own key out. */
function before(key) {
  const last = key.codePointAt(key.length - 1);
  return last > 32 ? key.slice(0, -1) + String.fromCodePoint(last - 1) + "~" : key.slice(0, -1);
}
