/** Where a job stands in its chain: what it came from, the batches inside it, what followed its close. */

import { count, fill, h, many, said } from "./dom.js";
import { stateBadge, stateOf } from "./list.js";

export function chain(id) {
  const list = h("ol", { class: "chain" });
  const element = h("section", { hidden: true }, h("h2", {}, "Chain"), list);

  function line(node) {
    const counted = node.total ? `${count(node.completed + node.failed + node.cancelled)} of ${count(node.total)}` : "";
    const words = { child: "inside", follow_up: "then" }[node.relation];
    const name = [said(node.kind, "b"), " ", node.key ? said(node.key) : `#${node.id}`];
    const row = h("li", { "aria-current": node.id === id ? "true" : null }, words && h("span", { class: "quiet" }, words),
      node.id === id ? h("span", {}, name) : h("a", { href: `#/jobs/${node.id}` }, name), stateBadge(node), h("span", { class: "figures quiet" }, counted, node.failed > 0 && ` · ${count(node.failed)} failed`));
    row.style.paddingLeft = `${Math.min(node.level, 8) * 1.25}rem`;
    return row;
  }

  return {
    element,
    show({ nodes, cut_above: above, cut_below: below }) {
      element.hidden = nodes.length < 2;
      fill(list, JSON.stringify(nodes.map((node) => [node.id, stateOf(node), node.completed, node.failed, node.cancelled, node.total])),
        above && h("li", { class: "quiet" }, "… begins further up"), nodes.map(line), below && h("li", { class: "quiet" }, `… and more than these ${many(nodes.length, "job")}`));
    },
  };
}
