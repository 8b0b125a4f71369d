/** Elements, and words for numbers and times. Text is only ever put in as text. */

const SVG = "http://www.w3.org/2000/svg";

function made(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value === "boolean") element[name] = value;
    else if (value !== undefined && value !== null && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, props, ...children) => made(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => made(document.createElementNS(SVG, tag), props, children);

/** Change what an element says, only if it differs: nothing flickers, no selection is lost. */
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Replace the children, only if `key` has changed since, and never under a question that is open. */
export function fill(element, key, ...children) {
  if (element.dataset.key === key || element.querySelector(".open")) return;
  const held = element.contains(document.activeElement) && document.activeElement.textContent;
  element.dataset.key = key;
  element.replaceChildren(...children.flat(9).filter(Boolean));
  if (held) [...element.querySelectorAll("a, button")].find((one) => one.textContent === held)?.focus();
}

const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
const BIDI = { 0x200e: "LRM", 0x200f: "RLM", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO",
  0x202e: "RLO", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI" };

function nameOf(character) {
  const code = character.codePointAt(0);
  if (code < 32) return String.fromCharCode(0x2400 + code);
  return BIDI[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** For places that take a string only: what cannot be seen is named. */
export const visible = (text) => String(text).replace(HIDDEN, (c) => `[${nameOf(c)}]`);

/** The end of a name: of paths and of numbered keys it tells more than the beginning. */
export function tail(text, most = 22) {
  const all = [...String(text)];
  return all.length > most ? `…${all.slice(1 - most).join("")}` : all.join("");
}

/** Text of strangers: isolated, what cannot be seen is shown, and copied as it is. */
export function said(text, tag = "bdi", props = {}) {
  const value = String(text ?? "");
  const parts = [];
  let end = 0;
  for (const { 0: character, index } of value.matchAll(HIDDEN)) {
    if (index > end) parts.push(value.slice(end, index));
    parts.push(h("span", { class: "ctl", "data-name": nameOf(character) }, character));
    end = index + character.length;
  }
  return h(tag, props, parts, value.slice(end));
}

/** JSON for reading; strings as they are. */
export const json = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

/** Long text: its beginning, and a button that opens the rest. */
export function long(text, most = 600, tag = "bdi", props = {}) {
  const value = String(text ?? "");
  if (value.length <= most) return said(value, tag, props);
  const open = h("button", { class: "link", type: "button", onclick: () => box.replaceWith(said(value, tag, props)) },
    `open all ${count(value.length)} characters`);
  const box = h("span", {}, said(value.slice(0, most), tag, props), "… ", open);
  return box;
}

const figures = new Intl.NumberFormat("en");
export const count = (number) => figures.format(number);
export const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

export function duration(seconds) {
  if (seconds < 1) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.floor(seconds)} s`;
  if (seconds < 5940) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) {
    const minutes = Math.round(seconds / 60);
    return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  return `${Math.round(seconds / 86400)} days`;
}

export function rate(perSecond) {
  const [value, unit] = perSecond >= 1 ? [perSecond, "second"]
    : perSecond * 60 >= 1 ? [perSecond * 60, "minute"] : [perSecond * 3600, "hour"];
  return `${value >= 100 ? count(Math.round(value)) : value.toFixed(1)} a ${unit}`;
}

/** "11 to 14 min", in one unit. */
export function between([low, high]) {
  if (high < 2) return "a moment";
  const [size, unit] = high < 100 ? [1, "s"] : high < 5940 ? [60, "min"] : [3600, "h"];
  const [a, b] = [low / size, high / size].map((n) => (unit === "h" ? n.toFixed(1) : String(Math.max(1, Math.round(n)))));
  return a === b ? `${a} ${unit}` : `${a} to ${b} ${unit}`;
}

/** The server's clock less ours, in ms: a pod's age must not depend on the watch of its reader. */
export const clock = { skew: 0, now: () => Date.now() + clock.skew };

const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const minute = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const second = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const whole = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });

const isToday = (date) => date.toDateString() === new Date(clock.now()).toDateString();
export const exact = (at) => whole.format(new Date(at));
export const atMinute = (at) => ((date) => (isToday(date) ? "" : `${day.format(date)} `) + minute.format(date))(new Date(at));
export const atSecond = (at) => second.format(new Date(at));

/** A sentence of the server, its times in the time zone of who reads it. */
export const hereTimes = (text) => text.replace(/\b(\d\d):(\d\d):(\d\d) UTC\b/g, (_, ...hms) => atSecond(new Date(clock.now()).setUTCHours(...hms.slice(0, 3).map(Number))));

function ago(at) {
  const seconds = (clock.now() - at) / 1000;
  if (seconds < -5) return `in ${duration(-seconds)}`;
  if (seconds < 5) return "just now";
  return seconds < 86400 ? `${duration(seconds)} ago` : atMinute(at);
}

/** A time that stays true while it is looked at, with the exact one on hover. */
export function when(at, words = ago) {
  const date = new Date(at);
  const element = h("time", { datetime: date.toISOString(), title: exact(date) }, words(date));
  if (words === ago) element.dataset.ago = "";
  return element;
}

setInterval(() => {
  for (const element of document.querySelectorAll("time[data-ago]")) put(element, ago(new Date(element.dateTime)));
}, 5000);

/** States: a letter, a word for people, and a shape beside the colour. */
export const STATES = { c: "completed", f: "failed", r: "running", p: "pending", w: "waiting", x: "cancelled" };
export const isEnded = (status) => ["completed", "failed", "cancelled"].includes(status);
export const letterOf = (status) => ({ processing: "r", cancelled: "x" })[status] ?? status[0];
export const wordOf = (status) => STATES[letterOf(status)];

/** The shape of a state as a path, in a square of `size` at (x, y); made for fill-rule evenodd. */
export function shape(letter, x, y, size) {
  const e = x + size, b = y + size, m = size / 2, t = size / 6;
  if (letter === "c") return `M${x} ${y}H${e}V${b}H${x}Z`;
  if (letter === "f") {
    const k = size / 4;
    return `M${x} ${y + k}L${x + k} ${y}L${x + m} ${y + k}L${e - k} ${y}L${e} ${y + k}L${e - k} ${y + m}L${e} ${b - k}`
      + `L${e - k} ${b}L${x + m} ${b - k}L${x + k} ${b}L${x} ${b - k}L${x + k} ${y + m}Z`;
  }
  if (letter === "r") return `M${x + m} ${y}A${m} ${m} 0 1 1 ${x + m} ${b}A${m} ${m} 0 1 1 ${x + m} ${y}Z`;
  if (letter === "x") return `M${x} ${y + m - t}H${e}V${y + m + t}H${x}Z`;
  if (letter === "w") return `M${x + m} ${y}L${e} ${y + m}L${x + m} ${b}L${x} ${y + m}ZM${x + m} ${y + 2 * t}L${e - 2 * t} ${y + m}L${x + m} ${b - 2 * t}L${x + 2 * t} ${y + m}Z`;
  return `M${x} ${y}H${e}V${b}H${x}ZM${x + t} ${y + t}V${b - t}H${e - t}V${y + t}Z`;
}

export const mark = (letter) => s("svg", { class: `mark ${letter}`, viewBox: "0 0 12 12", "aria-hidden": "true" },
  s("path", { d: shape(letter, 1, 1, 10) }));

/** A state as mark and word. */
export const badge = (status, outcome = wordOf(status)) =>
  h("span", { class: "badge" }, mark(outcome === "completed with failures" ? "c" : letterOf(status)), outcome);

export const endedOf = ({ completed, failed, cancelled }) => completed + failed + cancelled;

/**
 * Were these counters read before those that are shown, `at` that time? Two ways lead here, and one may be
 * slower; but what stays lower for long was put right by the sweep.
 */
export const isOlder = (next, shown, at) => next.generation < shown.generation
  || (next.generation === shown.generation && endedOf(next) < endedOf(shown) && clock.now() - at < 5000);

/** Rounded down; 100 only when closed. */
export function percentOf({ status, total, completed, failed, cancelled }) {
  if (isEnded(status)) return 100;
  return total ? Math.min(99, Math.floor(((completed + failed + cancelled) * 100) / total)) : 0;
}

/** A bar of segments. It is full at the close and not before. */
export function bar() {
  const parts = ["c", "f", "x", "r"].map((letter) => h("i", { class: letter }));
  const element = h("div", { class: "bar", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100 }, parts);
  return {
    element,
    show(job, percent = percentOf(job)) {
      const closed = percent === 100;
      const ended = job.completed + job.failed + job.cancelled;
      const total = Math.max(job.total, 1);
      const scale = closed ? 100 / Math.max(ended, 1) : Math.min(100, (99 * total) / Math.max(ended, 1)) / total;
      const shares = [job.completed, job.failed, job.cancelled].map((n) => n * scale);
      if (closed && !ended) shares[{ failed: 1, cancelled: 2 }[job.status] ?? 0] = 100;
      const left = 100 - shares.reduce((sum, share) => sum + share, 0);
      shares.push(closed ? 0 : Math.min(left, ((job.processing ?? 0) * 100) / total));
      parts.forEach((part, i) => { part.style.width = `${shares[i].toFixed(3)}%`; });
      element.setAttribute("aria-valuenow", percent);
      element.setAttribute("aria-label", `${wordOf(job.status)}, ${percent} percent`);
    },
  };
}

/** A button that asks once, in its place, and says what will happen. */
export function asking(label, question, act, { yes = label, className = "", rested } = {}) {
  const box = h("span", { class: "asking" });
  const rest = (focus) => {
    const button = h("button", { type: "button", class: className, onclick: ask }, label);
    box.replaceChildren(button);
    box.classList.remove("open");
    if (focus) button.focus();
    if (box.isConnected) rested?.();
  };
  const ask = () => {
    box.classList.add("open");
    const no = h("button", { type: "button", onclick: () => rest(true) }, "No");
    const sure = h("button", { type: "button", class: "danger", onclick: async () => {
      sure.disabled = no.disabled = true;
      try {
        const answer = await act();
        box.replaceChildren(h("span", { role: "status", class: "quiet" }, answer));
        setTimeout(() => rest(false), 6000);
      } catch (error) {
        box.replaceChildren(h("span", { role: "alert", class: "bad" }, said(error.message)), " ");
        setTimeout(() => rest(false), 10000);
      }
    } }, yes);
    box.replaceChildren(h("span", { role: "alert" }, typeof question === "function" ? question() : question), no, sure);
    no.focus();
    box.onkeydown = (e) => { if (e.key === "Escape") rest(true); };
  };
  rest(false);
  return box;
}
