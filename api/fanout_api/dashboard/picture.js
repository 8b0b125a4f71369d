/** Children as squares or as a strip, and what ended when, as SVG. */

import { atMinute, atSecond, count, duration, fill, many, put, s, said, h, shape, STATES } from "./dom.js";

const LETTERS = ["c", "f", "x", "r", "w", "p"];

const KEYS = 200; // looked up at a time

/**
 * One small shape a child, in key order. `open(id)` is called for the one that is chosen;
 * `keys(first, limit)` answers [{ id, key }], in that order.
 */
export function squares(open, keys) {
  const paths = Object.fromEntries(LETTERS.map((letter) => [letter, s("path", { class: letter })]));
  const ring = s("rect", { class: "ring", visibility: "hidden" });
  const svg = s("svg", { class: "squares", tabindex: 0, role: "group", "aria-label": "Children as squares; arrow keys choose one, Enter opens it" }, Object.values(paths), ring);
  const says = h("p", { class: "quiet says", "aria-live": "polite" });
  let [states, at, cell, columns] = ["", -1, 12, 1];
  let known = []; // { id, key } by place, as far as somebody looked
  const asked = new Map();

  /** Which child stands there; a page of neighbours comes with it. */
  async function childAt(i) {
    const first = i - (i % KEYS);
    if (!known[i]) {
      if (!asked.has(first)) asked.set(first, keys(first, KEYS).finally(() => asked.delete(first)));
      (await asked.get(first)).forEach((child, n) => { known[first + n] = child; });
    }
    return known[i];
  }

  const openAt = (i) => childAt(i).then((child) => child && open(child.id), () => {}); // the connection's state says the rest

  function draw() {
    const width = svg.parentElement?.clientWidth || 600;
    cell = states.length <= 400 ? 16 : states.length <= 1500 ? 12 : 9;
    columns = Math.max(1, Math.floor(width / cell));
    const height = Math.ceil(states.length / columns) * cell;
    svg.setAttribute("viewBox", `0 0 ${columns * cell} ${height}`);
    svg.setAttribute("width", columns * cell);
    svg.setAttribute("height", height);
    const drawn = Object.fromEntries(LETTERS.map((letter) => [letter, []]));
    for (let i = 0; i < states.length; i++) {
      drawn[states[i]]?.push(shape(states[i], (i % columns) * cell + 1, Math.floor(i / columns) * cell + 1, cell - 3));
    }
    for (const letter of LETTERS) paths[letter].setAttribute("d", drawn[letter].join(""));
  }

  function choose(i) {
    at = Math.max(0, Math.min(states.length - 1, i));
    for (const [name, value] of Object.entries({ x: (at % columns) * cell - 0.5, y: Math.floor(at / columns) * cell - 0.5, width: cell, height: cell, visibility: "visible" })) ring.setAttribute(name, value);
    tell();
    if (!known[at]) childAt(at).then(() => says.textContent && tell(), () => {});
  }

  function tell() {
    const key = known[at]?.key;
    const words = `${count(at + 1)} of ${count(states.length)}: ${STATES[states[at]]}`;
    fill(says, `${words} ${key}`, key === undefined ? [] : [said(key, "b"), " · "], h("span", {}, `${words}. Enter or click opens it.`));
  }

  const under = (e) => {
    const box = svg.getBoundingClientRect();
    const scale = (columns * cell) / box.width;
    const i = Math.floor(((e.clientY - box.top) * scale) / cell) * columns + Math.floor(((e.clientX - box.left) * scale) / cell);
    return i < states.length ? i : -1;
  };
  svg.addEventListener("pointermove", (e) => { if (under(e) >= 0) choose(under(e)); });
  svg.addEventListener("pointerleave", () => { ring.setAttribute("visibility", "hidden"); fill(says, ""); });
  svg.addEventListener("click", (e) => { if (under(e) >= 0) openAt(under(e)); });
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) choose(at); });
  svg.addEventListener("keydown", (e) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -states.length, End: states.length }[e.key];
    if (step) choose(at + step);
    else if (e.key === "Enter" && at >= 0) openAt(at);
    else if (e.key.length === 1 && "fr".includes(e.key)) choose(states.indexOf(e.key, at + 1)); // the next that failed, or runs
    else return;
    e.preventDefault();
  });
  const sized = new ResizeObserver(() => states && draw());
  return {
    element: h("div", { class: "picture" }, svg, says),
    show(next) {
      if (next === states) return;
      if (next.length !== states.length) known = []; // keys may have come in between
      states = next;
      draw();
      if (says.textContent) tell();
      sized.observe(svg.parentElement);
    },
  };
}

/** Many thousand children as a strip: each column some hundred neighbours, failures always visible. */
export function strip(open) {
  const height = 72;
  const svg = s("svg", { class: "strip", tabindex: 0, role: "group", "aria-label": "Children by key, as a strip; arrow keys choose a column, Enter shows it in the table", preserveAspectRatio: "none", height });
  const says = h("p", { class: "quiet says", "aria-live": "polite" }, "Each column is a run of neighbours by key; click one to see them in the table.");
  let [buckets, at] = [[], 0];

  const wordsOf = (bucket) => LETTERS.filter((letter) => bucket[letter]).map((letter) => `${count(bucket[letter])} ${STATES[letter]}`).join(", ");
  function choose(i) {
    at = Math.max(0, Math.min(buckets.length - 1, i));
    [...svg.children].forEach((column, n) => column.classList.toggle("chosen", n === at));
    fill(says, `${at} ${wordsOf(buckets[at])} ${buckets[at].first_key}`, "from ", said(buckets[at].first_key, "b"), ` on: ${wordsOf(buckets[at])}`);
  }
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) choose(at); });
  svg.addEventListener("keydown", (e) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -buckets.length, End: buckets.length }[e.key];
    if (step) choose(at + step);
    else if (e.key === "Enter") open(buckets[at]);
    else if (e.key === "f") choose(buckets.findIndex((bucket, i) => i > at && bucket.f)); // the next with failures
    else return;
    e.preventDefault();
  });
  return {
    element: h("div", { class: "picture" }, svg, says),
    show(next) {
      buckets = next;
      svg.setAttribute("viewBox", `0 0 ${buckets.length} ${height}`);
      svg.replaceChildren(...buckets.map((bucket, i) => {
        const total = LETTERS.reduce((sum, letter) => sum + (bucket[letter] ?? 0), 0) || 1;
        let y = height;
        const parts = LETTERS.filter((letter) => bucket[letter]).map((letter) => {
          const tall = Math.max(letter === "f" ? 4 : 1, (bucket[letter] / total) * height);
          y -= tall;
          return s("rect", { class: letter, x: i, y: Math.max(0, y), width: 1.02, height: tall });
        });
        return s("g", { class: i === at && says.dataset.key ? "chosen" : null, onclick: () => open(bucket), onpointerenter: () => choose(i) }, parts);
      }));
    },
  };
}

/** What ended when: a column a time, failures on top. */
export function chart() {
  const [W, H] = [640, 84];
  const bars = s("g");
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", height: H }, bars);
  const [most, begin, end, says] = [h("span"), h("span"), h("span"), h("span", { class: "quiet says" })];
  return {
    element: h("figure", {}, h("figcaption", {}, most, says), svg, h("div", { class: "axis quiet" }, begin, end)),
    show({ bucket_seconds: size, from, buckets }, least = 24) {
      const sums = buckets.map((b) => b.completed + b.failed + b.cancelled);
      const top = Math.max(1, ...sums);
      const step = W / Math.max(buckets.length, least);
      const start = Date.parse(from);
      bars.replaceChildren(...buckets.map((bucket, i) => {
        let y = H;
        const at = start + i * size * 1000;
        const parts = [["c", bucket.completed], ["x", bucket.cancelled], ["f", bucket.failed]].filter(([, n]) => n).map(([letter, n]) => {
          const tall = Math.max(letter === "f" ? 3 : 1, (n / top) * (H - 4));
          y -= tall;
          return s("rect", { class: letter, x: i * step, y, width: Math.max(0.5, step - 1), height: tall });
        });
        const words = `${atSecond(at)}: ${count(bucket.completed)} completed${bucket.failed ? `, ${count(bucket.failed)} failed` : ""}${bucket.cancelled ? `, ${count(bucket.cancelled)} cancelled` : ""}`;
        return s("g", { onpointerenter: () => put(says, words), onpointerleave: () => put(says, "") }, s("rect", { class: "none", x: i * step, y: 0, width: step, height: H }), parts);
      }));
      put(most, `Ended per ${size === 1 ? "second" : duration(size)}, at most ${count(top)}`);
      const stamp = size * buckets.length < 7200 ? atSecond : atMinute;
      put(begin, stamp(start));
      put(end, stamp(start + Math.max(buckets.length, least) * size * 1000));
      svg.setAttribute("aria-label", `${many(sums.reduce((a, b) => a + b, 0), "child", "children")} ended in ${duration(size * buckets.length)}; at most ${count(top)} in ${duration(size)}`);
    },
  };
}
