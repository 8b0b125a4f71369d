/** What handlers added up (tokens, cost, pages), and how much of the budget that is. */

import { fill, h, said, visible } from "./dom.js";

const figure = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });

/** How full something is; from nine tenths on it is said in another colour and pattern. */
export function meter(share, label) {
  const part = h("i", { class: share < 90 ? "r" : "f" });
  part.style.width = `${share}%`;
  return h("div", { class: "bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": share, "aria-label": label }, part);
}

export function sums() {
  const element = h("dl", { class: "sums figures" });
  return {
    element,
    show(added, budget) {
      const names = [...new Set([...Object.keys(budget ?? {}), ...Object.keys(added ?? {})])];
      element.hidden = !names.length;
      fill(element, JSON.stringify([added, budget]), names.map((name) => {
        const [sum, most] = [added?.[name] ?? 0, budget?.[name]];
        const share = most ? Math.min(100, Math.floor((sum * 100) / most)) : 0;
        return h("div", {}, h("dt", {}, said(name)), h("dd", {}, figure.format(sum), most !== undefined && ` of ${figure.format(most)} · ${share} %`),
          most !== undefined && meter(share, `${visible(name)}: ${share} percent of the budget`));
      }));
    },
  };
}
