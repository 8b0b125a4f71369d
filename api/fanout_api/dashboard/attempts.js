/** The tries of a job, one below the other, on one line of time. */

import { atSecond, count, duration, exact, fill, h, long, mark, said } from "./dom.js";

const WORDS = {
  running: ["r", "running"], completed: ["c", "completed"], failed: ["f", "failed"], lost: ["f", "its worker fell silent"],
  retry: ["w", "failed, tried again"], released: ["x", "put back, at no cost"], cancelled: ["x", "cancelled"],
};

export function timeline() {
  const list = h("ol", { class: "timeline" });
  const element = h("section", { hidden: true }, h("h2", {}, "Attempts"), list);
  return {
    element,
    show(attempts) {
      element.hidden = !attempts.length;
      const times = attempts.flatMap((one) => [one.started_at ?? one.ended_at, one.ended_at ?? new Date().toISOString()]).map(Date.parse);
      const [begin, end] = [Math.min(...times), Math.max(...times)];
      const place = (at) => ((Date.parse(at) - begin) * 100) / Math.max(1, end - begin);
      fill(list, JSON.stringify(attempts), attempts.map((one) => {
        const [letter, words] = WORDS[one.outcome] ?? ["p", one.outcome];
        const line = h("i", { class: letter });
        const left = place(one.started_at ?? one.ended_at);
        line.style.marginLeft = `${Math.min(99, left)}%`;
        line.style.width = `${Math.max(0.8, (one.ended_at ? place(one.ended_at) : 100) - left)}%`;
        const took = one.started_at && one.ended_at ? duration((Date.parse(one.ended_at) - Date.parse(one.started_at)) / 1000) : "";
        return h("li", {}, h("b", { class: "figures" }, count(one.attempt)), h("span", { class: "badge" }, mark(letter), words),
          h("span", { class: "figures quiet", title: one.started_at && exact(one.started_at) }, [one.started_at && atSecond(one.started_at), took].filter(Boolean).join(" · ")),
          h("div", { class: "span", "aria-hidden": "true" }, line),
          one.error && h("div", { class: "error" }, long(one.error, 300), " ", one.error_type && said(one.error_type, "small", { class: "quiet" })));
      }));
    },
  };
}
