/** What is wrong now, above every view; and what was, as a table. */

import { get, poll } from "./api.js";
import { count, fill, h, hereTimes, mark, said, when } from "./dom.js";

const MOST = 3; // lines above a view

const line = (alert) => h("li", {}, mark("f"), said(hereTimes(alert.message)), " · since ", when(alert.opened_at),
  alert.job_id !== null && [" · ", h("a", { href: `#/jobs/${alert.job_id}` }, `job ${alert.job_id}`)]);

/** Incidents that last. Whoever may not see the whole installation is not told. */
export function banner(element) {
  return poll(async () => {
    const { alerts } = await get("alerts", { open: true });
    element.hidden = !alerts.length;
    fill(element, JSON.stringify(alerts), alerts.slice(0, MOST).map(line),
      alerts.length > MOST && h("li", {}, h("a", { href: "#/workers" }, `and ${count(alerts.length - MOST)} more`)));
  }, 10, (error) => {
    element.hidden ||= [401, 403].includes(error.status);
    return ![401, 403].includes(error.status);
  });
}

export const incidents = (alerts) => alerts.map((alert) => h("tr", {}, h("td", {}, when(alert.opened_at)),
  h("td", {}, alert.closed_at ? when(alert.closed_at) : h("b", { class: "bad" }, "lasts")), h("td", {}, said(alert.kind.replaceAll("_", " "))),
  h("td", {}, said(hereTimes(alert.message)), alert.job_id !== null && [" ", h("a", { href: `#/jobs/${alert.job_id}` }, `job ${alert.job_id}`)])));
