/** Schedules: what is submitted when, and what became of it. */

import { get, mayNot, poll, post } from "./api.js";
import { asking, fill, h, said, when } from "./dom.js";

const MISSED = { one: "one for all of it", skip: "skipped", all: "each made up for" };

export function schedulesView({ fail }) {
  const place = h("div");
  const why = () => mayNot("operate");
  const verb = (label, question, act) => (why() ? h("button", { type: "button", disabled: true, title: why(), "aria-description": why() }, label)
    : asking(label, question, async () => { const answer = await act(); look.soon(); return answer; }));

  function row(one) {
    const path = `cron/${encodeURIComponent(one.name)}`;
    return h("tr", { class: one.enabled ? "" : "quiet" }, h("td", {}, said(one.name, "b")), h("td", {}, said(one.kind)),
      h("td", { class: "figures" }, h("code", {}, one.expression), " ", said(one.timezone)), h("td", {}, one.enabled ? when(one.next_at) : "paused"),
      h("td", {}, one.last_at ? [when(one.last_at), one.last_job_id && [" · ", h("a", { href: `#/jobs/${one.last_job_id}` }, `job ${one.last_job_id}`)]] : "never"),
      h("td", { class: "quiet" }, MISSED[one.missed] ?? one.missed),
      h("td", {}, h("span", { class: "filters" }, one.enabled ? verb("Pause", "No job of it until it is resumed; what is missed is not made up for.", async () => { await post(`${path}/pause`); return "paused"; })
        : verb("Resume", "It goes on with its next time.", async () => { await post(`${path}/resume`); return "it goes on"; }),
      verb("Run now", `Submits one job of ${one.kind} now.`, async () => { const { job_id: id } = await post(`${path}/run`); return h("a", { href: `#/jobs/${id}` }, `job ${id}`); }))));
  }

  const look = poll(async () => {
    const { schedules } = await get("cron");
    fill(place, JSON.stringify(schedules), schedules.length
      ? h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["Schedule", "Kind", "When", "Next", "Last", "If missed", ""].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, schedules.map(row))))
      : h("div", { class: "empty" }, h("p", {}, "Nothing is scheduled. Above a handler:"), h("p", {}, h("code", {}, '@engine.cron("0 7 * * 1-5", timezone="Europe/Berlin")'))));
  }, 5, fail);

  return { element: h("section", { "data-ready": "" }, h("h1", {}, "Schedules"), place), stop: look.stop };
}
