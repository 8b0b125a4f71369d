/** All batches, newest first, with bars that move. */

import { get, poll, report, base } from "./api.js";
import { badge, bar, clock, count, duration, endedOf, fill, h, hereTimes, isEnded, isOlder, mark, percentOf, put, said, when } from "./dom.js";
import { FanoutEvents } from "./fanout-events.js";

const PAGE = 25;
const MOST = 32; // that one stream follows
const [SLOW, QUICK] = [5, 2]; // seconds between looks for new rows; where the stream does not come

export function listView({ params, address, fail }) {
  const rows = new Map();
  const list = h("ul", { class: "jobs", "data-ready": "" });
  const news = h("button", { class: "link news", type: "button", hidden: true, onclick: () => { held = false; look.soon(); } });
  const more = h("button", { type: "button", hidden: true, onclick: loadMore }, "Load more");
  const empty = h("div");
  let [next, known, held] = [null, null, false];
  const followed = new Set();
  const events = new FanoutEvents({ start: "progress" });
  const tell = () => report("list", followed.size && events.status.state !== "ended" ? events.status : null);
  events.on("status", tell);
  events.on("progress", async ({ data }) => {
    const moved = rows.get(data.id);
    if (!moved) return;
    moved.show(isEnded(data.status) ? await get(`jobs/${data.id}`).catch(() => data) : data);
    follow();
  });

  /** The stream follows the rows that can still move: the newest, if there are very many. */
  function follow() {
    const open = [...rows.values()].filter((r) => r.open).map((r) => r.id).sort((a, b) => b - a).slice(0, MOST);
    for (const id of followed) if (!open.includes(id)) { followed.delete(id); events.unfollow(id); }
    for (const id of open) if (!followed.has(id)) { followed.add(id); events.follow(id); }
    tell();
  }

  const filters = () => ({ kind: kind.value, status: status.value });
  const filter = (e) => {
    e?.preventDefault();
    address.write(filters());
    [next, known] = [null, null];
    rows.clear();
    list.replaceChildren();
    look.soon();
  };
  const status = h("select", { id: "status", onchange: filter }, h("option", { value: "" }, "any state"),
    ["pending", "processing", "waiting", "completed", "failed", "cancelled"].map((name) =>
      h("option", { value: name, selected: params.get("status") === name }, { processing: "dispatching", waiting: "running" }[name] ?? name)));
  const kind = h("input", { id: "kind", type: "search", placeholder: "every kind", value: params.get("kind") ?? "", list: "kinds", onchange: filter });
  const kinds = h("datalist", { id: "kinds" });
  get("kinds").then((all) => kinds.append(...all.kinds.map((k) => h("option", { value: k.name }))), () => {});

  async function loadMore() {
    more.disabled = true;
    try {
      const page = await get("jobs", { ...filters(), before: next, limit: PAGE });
      for (const job of page.jobs) list.append(row(job).element);
      follow();
      next = page.next;
    } finally {
      more.disabled = false;
      more.hidden = !next;
    }
  }

  function row(job) {
    if (!rows.has(job.id)) rows.set(job.id, line(job));
    rows.get(job.id).show(job);
    return rows.get(job.id);
  }

  const look = poll(async () => {
    const page = await get("jobs", { ...filters(), limit: PAGE });
    const fresh = page.jobs.filter((job) => !rows.has(job.id));
    // Rows do not move away under a pointer: new ones wait behind a button.
    if (known && fresh.length && list.matches(":hover, :focus-within") && held !== false) {
      put(news, `${count(fresh.length)} new, show`);
      news.hidden = false;
      for (const job of page.jobs) if (rows.has(job.id)) row(job);
    } else {
      page.jobs.forEach((job, i) => {
        const { element } = row(job);
        if (list.children[i] !== element) list.insertBefore(element, list.children[i] ?? null);
      });
      news.hidden = true;
      if (!known) next = page.next;
      known = true;
    }
    held = true;
    more.hidden = !next;
    const filtered = status.value || kind.value;
    fill(empty, rows.size ? "" : `none${filtered}`, rows.size ? [] : filtered
      ? h("p", { class: "empty" }, "No batch is like this. ", h("button", { class: "link", type: "button", onclick: () => { status.value = kind.value = ""; filter(); } }, "Show all"))
      : firstSteps());
    follow();
    const unheard = [...rows.values()].filter((r) => r.open && !followed.has(r.id)).slice(0, 10);
    await Promise.all(unheard.map(async (r) => r.show(await get(`jobs/${r.id}`))));
    return events.status.state === "live" || !followed.size ? SLOW : QUICK;
  }, SLOW, fail);

  return {
    element: h("section", {}, h("div", { class: "bar-top" }, h("h1", {}, "Batches"),
      h("form", { class: "filters", onsubmit: filter }, h("label", { for: "status" }, "State"), status, h("label", { for: "kind" }, "Kind"), kind, kinds)),
    h("p", { class: "above", "aria-live": "polite" }, news), list, empty, more),
    update(params) {
      status.value = params.get("status") ?? "";
      kind.value = params.get("kind") ?? "";
      filter();
    },
    stop() {
      look.stop();
      events.close();
      report("list", null);
    },
  };
}

function line(first) {
  let job = first;
  let at = 0;
  const [state, name, figures, time, note] = [h("span"), h("a", { href: `#/jobs/${first.id}`, class: "name" }), h("span", { class: "figures" }), h("span", { class: "time" }), h("span", { class: "note" })];
  const progress = bar();
  name.append(said(job.kind, "b"), " ", job.key ? said(job.key, "span", { class: "key" }) : h("span", { class: "quiet" }, `#${job.id}`));
  return {
    id: job.id,
    element: h("li", {}, name, state, progress.element, figures, note, time),
    show(next) {
      if (isOlder(next, job, at)) return;
      job = { ...job, ...next };
      at = clock.now();
      this.open = !isEnded(job.status);
      if (this.open) job.finished_at = null;
      progress.show(job);
      fill(state, stateOf(job), stateBadge(job));
      const ended = endedOf(job);
      put(figures, job.total ? `${count(ended)} of ${count(job.total)} · ${percentOf(job)} %` : "");
      const why = this.open ? job.waits_for?.[0] && hereTimes(job.waits_for[0]) : job.reason || job.error;
      fill(note, `${job.failed} ${why}`, job.failed ? [mark("f"), `${count(job.failed)} failed`] : [], why ? said(why.slice(0, 120)) : []);
      fill(time, job.finished_at ?? job.status, job.finished_at
        ? [`took ${duration((Date.parse(job.finished_at) - Date.parse(job.created_at)) / 1000)} · `, when(job.finished_at)] : [job.status === "pending" ? "submitted " : "started ", when(job.created_at)]);
    },
  };
}

/** A batch whose children run is "waiting" for the engine, and running for everybody else. */
export function stateOf({ status, total, failed, paused }) {
  if (status === "completed") return failed ? "completed with failures" : status;
  if (paused && !isEnded(status)) return "paused";
  return { waiting: "running", processing: total ? "dispatching" : "running" }[status] ?? status;
}

export const stateBadge = (job, words = stateOf(job)) =>
  badge(words === "paused" ? "waiting" : job.status === "waiting" ? "processing" : job.status, words);

function firstSteps() {
  const payload = '{"kind": "papers_batch", "payload": {"import_id": 7}}';
  return h("div", { class: "empty" }, h("h2", {}, "No batches yet"), h("p", {}, "Submit one, in any of these ways; it appears here by itself."),
    h("dl", { class: "ways" },
      h("dt", {}, "Shell"), h("dd", {}, h("code", {}, `fanout submit papers_batch '{"import_id": 7}'`)),
      h("dt", {}, "Python"), h("dd", {}, h("code", {}, "await engine.submit(papers_batch, Import(import_id=7))")),
      h("dt", {}, "HTTP"), h("dd", {}, h("code", {}, `curl ${base}v1/jobs --json '${payload}'`))),
    h("p", {}, h("a", { href: "#/submit" }, "or with a form")));
}
