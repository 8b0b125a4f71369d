/** Who works, who is lost, what nobody serves, and what does not move. */

import { incidents } from "./alerts.js";
import { get, poll } from "./api.js";
import { count, duration, fill, h, many, put, said, when } from "./dom.js";

const table = (names, rows) => h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows)));

export function workersView({ fail }) {
  const [alarms, pods, kinds, stuck, wrong] = [h("div"), h("div"), h("section"), h("section"), h("section")];
  const sum = h("p", { class: "quiet figures" });
  const look = poll(async () => {
    const [{ workers }, all, still, { alerts }] = await Promise.all([get("workers"), get("kinds"), get("stuck"), get("alerts", { limit: 20 })]);
    const alive = workers.filter((worker) => worker.state !== "lost");
    const running = alive.reduce((n, worker) => n + worker.running, 0);
    put(sum, alive.length ? `${many(alive.length, "worker")} · ${count(running)} running of ${count(alive.reduce((n, w) => n + w.concurrency, 0))} at a time` : "");
    const bare = all.kinds.filter((kind) => !kind.workers);
    fill(alarms, JSON.stringify([bare.map((k) => k.name)]), bare.map((kind) => h("p", { class: "notice" }, "No worker for ", said(kind.name, "b"), ". Its jobs wait; nothing is lost.")));
    fill(pods, JSON.stringify(workers.map((w) => [w.id, w.state, w.running, w.last_beat_at])), workers.length ? table(["Worker", "State", "Running", "Last beat", "Up", "Kinds", "Host"],
      workers.map((worker) => h("tr", { class: worker.state },
        h("td", {}, said(worker.name)), h("td", {}, h("span", { class: `badge ${worker.state}` }, worker.state)), h("td", { class: "figures" }, `${worker.running} of ${worker.concurrency}`),
        h("td", {}, when(worker.last_beat_at)), h("td", { class: "figures" }, duration(Math.max(0, (Date.parse(worker.last_beat_at) - Date.parse(worker.started_at)) / 1000))),
        h("td", {}, worker.kinds.map((kind, i) => [i ? ", " : "", said(kind)])), h("td", { class: "quiet" }, said(`${worker.host} · ${worker.pid} · ${worker.version}`)))))
      : h("p", { class: "empty" }, "No worker has been seen within a day. Start one: ", h("code", {}, "fanout worker --app yours:engine")));
    fill(kinds, JSON.stringify(all.kinds.map((k) => [k.name, k.workers])), h("h2", {}, "Kinds"), table(["Kind", "Workers", "Time-out", "Retries", "Then"], all.kinds.map((kind) => h("tr", {},
      h("td", {}, h("a", { href: `#/submit?kind=${encodeURIComponent(kind.name)}` }, said(kind.name))), h("td", { class: kind.workers ? "figures" : "figures bad" }, kind.workers ? count(kind.workers) : "none"),
      h("td", { class: "figures" }, kind.timeout_seconds ? duration(kind.timeout_seconds) : ""), h("td", { class: "figures" }, kind.max_retries ?? ""), h("td", {}, kind.on_closed ? said(kind.on_closed) : "")))));
    fill(stuck, JSON.stringify(still.stuck), h("h2", {}, "What does not move"), still.stuck.length ? table(["Job", "Kind", "Why", "Since"], still.stuck.map((one) => h("tr", {},
      h("td", {}, h("a", { href: `#/jobs/${one.id}` }, `#${one.id}`)), h("td", {}, said(one.kind)), h("td", {}, said(one.why)), h("td", {}, one.since && when(one.since))))) : h("p", { class: "quiet" }, "Everything moves, or waits for what it says."));
    fill(wrong, JSON.stringify(alerts), h("h2", {}, "Incidents"), alerts.length ? table(["Begun", "Ended", "What", "Said"], incidents(alerts)) : h("p", { class: "quiet" }, "None was told of late."));
  }, 3, fail);
  return { element: h("section", { "data-ready": "" }, h("h1", {}, "Workers"), sum, alarms, pods, kinds, stuck, wrong), stop: look.stop };
}
