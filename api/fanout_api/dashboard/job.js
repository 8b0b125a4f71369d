/** One job: a batch with all that belongs to it, a child, or a job that stands alone. */

import { download, get, mayNot, poll, report } from "./api.js";
import { timeline } from "./attempts.js";
import { chain } from "./chain.js";
import { atMinute, bar, between, clock, count, duration, fill, h, hereTimes, isEnded, isOlder, json, long, many, mark, put, rate, said, visible, when, wordOf } from "./dom.js";
import { FanoutEvents } from "./fanout-events.js";
import { stateBadge, stateOf } from "./list.js";
import { logView } from "./log.js";
import { chart, squares, strip } from "./picture.js";
import { sums } from "./sums.js";
import { tableView } from "./table.js";
import { settingsOf, verbsOf } from "./verbs.js";

export function jobView(context, id) {
  id = Number(id);
  const box = h("article", {}, h("p", { class: "quiet" }, "Loading …"));
  let view = null;
  let stopped = false;
  const look = poll(async () => {
    const job = await get(`jobs/${id}`);
    if (stopped) return Infinity;
    if (!view) {
      view = shown(context, job, () => look.soon());
      box.replaceChildren(view.element);
      box.dataset.ready = "";
      view.begin();
    }
    view.show(job);
    await view.around();
    return isEnded(job.status) ? 15 : view.isLive() ? 10 : 3;
  }, 5, context.fail);
  return {
    element: box,
    named: true,
    update: (params) => view?.update(params),
    stop() {
      stopped = true;
      look.stop();
      view?.stop();
    },
  };
}

function shown(context, first, soon) {
  const { id } = first;
  const isChild = first.parent_id !== null && first.parent_id !== undefined;
  let [job, events, received, timer] = [first, null, clock.now(), 0];
  const name = isChild ? first.document_key : first.key;

  // -- the head: what a person wants to know within two seconds -----------------------------------
  const state = h("span");
  const progress = bar();
  const [percent, figures, times, waits, why] = [h("strong", { class: "figures percent" }), h("p", { class: "counts", "aria-live": "polite" }), h("p", { class: "figures quiet" }), h("ul", { class: "waits" }), h("p", { class: "reason" })];
  const verbs = verbsOf(first, { done: soon, reopened: () => events?.follow(first.root_id ?? id) });
  const settings = isChild ? null : settingsOf(first, soon);
  const used = sums();
  const head = h("header", { class: "job" },
    isChild && h("p", { class: "crumbs" }, h("a", { href: `#/jobs/${first.parent_id}` }, `Batch ${first.parent_id}`), " › child"),
    h("h1", {}, said(first.kind, "b"), " ", name ? said(name, "span", { class: "key" }) : h("span", { class: "key" }, `#${id}`)),
    h("div", { class: "row" }, state, verbs.element), h("div", { class: "row" }, progress.element, percent), figures, times, used.element, waits, why);

  // -- what changes less often --------------------------------------------------------------------
  const over = chart();
  const history = h("section", { hidden: true }, h("h2", {}, "Over time"), over.element);
  const table = tableView(id, context);
  const picture = h("div");
  const tabs = ["squares", "table"].map((view) => h("button", { type: "button", onclick: () => choose(view) }, view === "table" ? "Table" : "All at a glance"));
  const legend = h("span", { class: "legend" });
  const children = h("section", { hidden: true }, h("div", { class: "bar-top" }, h("h2", {}, "Children"), h("div", { class: "filters" }, tabs, legend)), picture, table.element);
  const [list, groups] = [h("ul", { class: "reasons" }), new Map()];
  const failures = h("section", { hidden: true }, h("h2", {}, "Failures"), list);
  const facts = h("section", { class: "facts" });
  const around = chain(id);
  const tries = timeline();
  const log = logView(first.root_id ?? id, { ...context, only: isChild ? id : null });
  const exports = h("p", { class: "exports quiet", hidden: true }, "Export: ", ["children", "results", "failures"].map((what) => [what, " ", download("CSV", `jobs/${id}/export`, { what, format: "csv" }), " ", download("JSON lines", `jobs/${id}/export`, { what, format: "jsonl" }), what === "failures" ? "" : " · "]));

  let drawn = null;
  let [isDue, isStopped] = [false, false];
  let kindOf = "";
  function choose(view, push = true) {
    if (push) context.address.write({ view: view === "table" ? "table" : "" }, true);
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String((view === "table") === (i === 1))));
    picture.hidden = view === "table";
    table.show(view === "table");
    details();
  }

  /** Grid, history and failures: every two seconds at most, only what is looked at. */
  function details() {
    if (!job.total) return;
    isDue = true;
    timer ||= setTimeout(async () => {
      isDue = false;
      try {
        await Promise.all([
          get(`jobs/${id}/history`).then((found) => { history.hidden = !found.buckets.length; if (found.buckets.length) over.show(found, isEnded(job.status) ? 8 : 24); }),
          picture.hidden ? table.refresh() : get(`jobs/${id}/grid`).then(draw),
          job.failed ? get(`jobs/${id}/failures`, { limit: 20 }).then(reasons) : (failures.hidden = !list.querySelector(".open")),
        ]);
      } catch (error) {
        if (error.status === undefined) throw error; // the connection's state says the rest
      } finally {
        timer = 0;
        if (isDue && !isStopped) details(); // it changed while it was read
      }
    }, drawn ? 2000 : 0);
  }

  function draw(grid) {
    if (!drawn || kindOf !== grid.kind) {
      drawn = grid.kind === "density" ? strip((bucket) => { context.address.write({ from: bucket.first_key, status: "" }); table.update(); choose("table"); }) : squares((child) => { location.hash = `#/jobs/${child}`; }, async (first, limit) => (await get(`jobs/${id}/keys`, { first, limit })).keys);
      kindOf = grid.kind;
      picture.replaceChildren(drawn.element);
    }
    drawn.show(grid.kind === "density" ? grid.buckets : grid.states);
  }

  /** Groups keep their rows, so that none goes away under a finger; new ones come below. */
  function reasons({ reasons: found }) {
    failures.hidden = false;
    for (const reason of found) {
      const name = JSON.stringify([reason.error, reason.error_type]);
      if (!groups.has(name)) groups.set(name, group(reason));
      groups.get(name)(reason.count, reason.example);
    }
    for (const [name, set] of groups) if (!found.some((r) => JSON.stringify([r.error, r.error_type]) === name)) set(0, "");
  }

  function group({ error, error_type: type }) {
    const [number, example] = [h("b", { class: "figures bad" }), h("div", { class: "quiet" })];
    let now = 0;
    const row = h("li", {}, number, h("div", {}, long(error, 300), " ", type && said(type, "small", { class: "quiet" }), example), h("span", { class: "actions" },
      verbs.verb("Retry", mayNot("operate"), () => `Runs ${many(now, "child", "children")} again.`, () => verbs.retry({ error })),
      h("button", { type: "button", onclick: () => { context.address.write({ status: "failed", reason: error }); table.update(); choose("table"); table.element.scrollIntoView(); } }, "Show")));
    list.append(row);
    return (n, key) => {
      now = n;
      put(number, count(n));
      row.hidden = !n && !row.querySelector(".open");
      fill(example, key, "as in ", said(key));
    };
  }

  // -- showing -------------------------------------------------------------------------------------
  function show(next) {
    if (isOlder(next, job, received)) return;
    const was = job;
    job = { ...job, ...next };
    received = clock.now();
    const p = job.progress ?? job;
    const ended = isEnded(job.status);
    if (p.paused !== undefined) job.paused = p.paused;
    const words = isChild && !job.total ? wordOf(job.status) : stateOf(job);
    fill(state, words, stateBadge(job, words));
    const isBatch = job.total > 0;
    const value = p.percent ?? (ended ? 100 : 0);
    progress.element.hidden = percent.hidden = figures.hidden = !isBatch && !(ended && !isChild && job.payload === undefined);
    progress.show({ ...job, processing: p.processing }, value);
    put(percent, `${value} %`);
    const parts = [["c", job.completed, "completed"], ["f", job.failed, "failed"], ["x", job.cancelled, "cancelled"], ["r", p.processing ?? 0, "running"], ["p", p.pending ?? 0, "waiting"]]
      .filter(([letter, n]) => n || letter === "c");
    fill(figures, JSON.stringify([parts, job.total]), h("span", {}, `${count(p.ended ?? job.completed + job.failed + job.cancelled)} of ${count(job.total)}`), parts.map(([letter, n, word]) => h("span", {}, mark(letter), `${count(n)} ${word}`)));
    fill(legend, parts.map(([letter]) => letter).join(""), parts.map(([letter, , word]) => h("span", {}, mark(letter), word)));
    fill(waits, JSON.stringify(p.waits_for ?? []), (p.waits_for ?? []).map((line) => said(hereTimes(line), "li")));
    const reason = isChild || !isBatch ? "" : job.reason || job.error || "";
    fill(why, reason, reason ? long(reason) : []);
    tick();
    verbs.show(job);
    settings?.show(job);
    used.show(p.sums ?? job.sums, job.budget);
    for (const part of [children, exports]) part.hidden = !isBatch;
    showFacts();
    document.title = `${isBatch && !ended ? `${value} % · ` : ""}${visible(name ?? job.kind)} · fanout`;
    if (!drawn || job.status !== was.status || p.ended !== was.progress?.ended || p.processing !== was.progress?.processing) details();
    if (ended && !isEnded(was.status)) {
      soon();
      verbs.ended(`${visible(name ?? job.kind)}: ${words}`, isBatch ? `${count(job.completed)} of ${count(job.total)} completed, ${count(job.failed)} failed` : "");
    } else if (!ended && isEnded(was.status)) events?.follow(first.root_id ?? id);
  }

  /** The sentence that moves with the clock. It stands still when we are not connected. */
  function tick() {
    const p = job.progress ?? {};
    const ended = isEnded(job.status);
    const since = (clock.now() - received) / 1000;
    const isStale = document.body.classList.contains("stale");
    const start = Date.parse(isChild ? job.claimed_at : job.created_at);
    const elapsed = ((job.finished_at ? Date.parse(job.finished_at) : isStale ? received : clock.now()) - start) / 1000;
    put(times, [isChild && !job.claimed_at ? `waits since ${atMinute(job.created_at)}` : `started ${atMinute((isChild && job.claimed_at) || job.created_at)}`, Number.isFinite(elapsed) && (ended ? `took ${duration(elapsed)}` : duration(elapsed)),
      job.total && p.rate_per_second && rate(p.rate_per_second), !ended && !job.paused && p.eta_seconds && `about ${between(p.eta_seconds.map((n) => Math.max(0, n - (isStale ? 0 : since))))} left`].filter(Boolean).join(" · "));
  }

  function showFacts() {
    const rows = [];
    const add = (label, ...value) => rows.push(h("dt", {}, label), h("dd", {}, ...value));
    if (job.error && (isChild || !job.total)) add("Error", long(job.error, 2000, "pre", { class: "bad" }), job.error_type && said(job.error_type, "small", { class: "quiet" }));
    if (job.reason && (isChild || !job.total)) add("Reason", said(job.reason));
    if (job.result !== null && job.result !== undefined) add("Result", long(json(job.result), 2000, "pre"));
    if (job.payload !== null && job.payload !== undefined) add(isChild ? "Snapshot" : "Payload", long(json(job.payload), 2000, "pre"));
    if (job.total && job.attempt > 1) add("Attempts", `${count(job.attempt)}${job.failures ? ` · ${job.failures} of ${job.max_retries + 1} tries failed` : ""}${job.deaths ? ` · ${many(job.deaths, "worker")} died while it ran` : ""}`);
    if (!isEnded(job.status) && Date.parse(job.run_at) > Date.now() + 1000) add("Runs", when(job.run_at));
    if (job.created_at) add("Submitted", when(job.created_at));
    if (job.claimed_at && !job.total) add("Begun", when(job.claimed_at));
    if (job.finished_at) add("Ended", when(job.finished_at));
    if (job.deadline) add("Deadline", when(job.deadline));
    if (job.on_closed) add("Then", said(job.on_closed));
    if (job.follows_id) add("Follows", h("a", { href: `#/jobs/${job.follows_id}` }, `job ${job.follows_id}`));
    add("Job", `${id}${job.priority === 5 || job.priority === undefined ? "" : ` · priority ${job.priority}`}${job.generation > 1 ? ` · opened ${job.generation} times` : ""}`);
    fill(facts, JSON.stringify([job.status, job.result, job.error, job.reason, job.attempt, job.finished_at, job.run_at, job.failures]), h("h2", {}, "Facts"), h("dl", {}, rows));
  }

  function follow() {
    const stream = first.root_id ?? id;
    // A child's stream is its own connection, for it is filtered by the server.
    events = new FanoutEvents({ jobs: [isChild ? id : stream], start: isChild ? null : "newest", share: !isChild, hidden: isChild ? 5 : 60 });
    let quiet = 0;
    const leave = () => { clearTimeout(quiet); if (isChild && isEnded(job.status)) quiet = setTimeout(() => { events.close(); report("log", null); }, 3000); };
    events.on("status", (status) => { report("log", status); if (status.state === "refused" && status.status === 401) context.fail(status); });
    events.on("hello", ({ streams }) => { const head = streams.find((one) => one.job === stream); if (head) log.hello(head); soon(); leave(); });
    events.on("progress", ({ data }) => { if (data.id === id) show({ status: data.status, total: data.total, completed: data.completed, failed: data.failed, cancelled: data.cancelled, generation: data.generation, progress: { ...job.progress, ended: data.completed + data.failed + data.cancelled, ...data } }); });
    for (const type of ["log", "step", "failed", "retry", "dropped", "reopened", "end"]) {
      events.on(type, (event) => { log.add(event); if (type === "end") soon(); else if (isChild && type !== "log" && type !== "step") soon(); leave(); });
    }
    events.on("reset", ({ data }) => log.add({ type: "reset", id: data.from, number: 0, data }));
    report("log", events.status);
  }

  const ticking = setInterval(tick, 1000);
  return {
    element: h("div", {}, head, isChild ? [tries.element, facts] : [history], children, failures, around.element, log.element, isChild ? [] : [settings.element, facts], exports),
    begin() {
      choose(context.params.get("view") === "table" ? "table" : "squares", false);
      follow();
    },
    show,
    /** What changes with a close, and with what came before. */
    async around() {
      if (!job.total && job.attempt) tries.show((await get(`jobs/${id}/attempts`)).attempts);
      if (!isChild || job.total) around.show(await get(`jobs/${id}/tree`));
    },
    isLive: () => events?.status.state === "live",
    update(params) {
      log.go(params.get("line"));
      choose(params.get("view") === "table" ? "table" : "squares", false);
      table.update();
    },
    stop() {
      isStopped = true;
      clearInterval(ticking);
      clearTimeout(timer);
      events?.close();
      report("log", null);
    },
  };
}
