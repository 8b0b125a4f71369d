/** The log: a window over a stream, not a document that grows. */

import { get, url } from "./api.js";
import { atSecond, count, exact, fill, h, long, many, put, said, tail, visible } from "./dom.js";
import { parseCursor } from "./fanout-events.js";

const MOST = 10000; // lines in memory
const SHOWN = 300; // lines in the document
const STEP = 100;
const LOAD = 1000;
const LEVELS = { debug: 0, step: 0, info: 1, log: 1, retry: 2, warning: 2, dropped: 2, reset: 2, end: 1, failed: 3, error: 3 };
const FINEST = 700; // characters of a line before it opens

/** `only`: show one job's lines. */
export function logView(job, { params, address, only = null }) {
  let [lines, found, from, to, fresh, apart, timer, first, nearest] = [[], [], 0, 0, 0, false, 0, 1, 0];
  let follow = !params.get("line");
  let isWhole = false; // what was found is of all that is stored, not of the lines here
  const known = new Set();
  const rows = h("div", { class: "lines" });
  const older = h("button", { class: "link", type: "button", hidden: true, onclick: loadOlder });
  const box = h("div", { class: only ? "log only own" : "log only", role: "log", "aria-live": "off", tabindex: 0, "aria-label": "Log lines", onscroll: scrolled, onkeydown: pressed }, older, rows);
  const toggle = h("button", { type: "button", "aria-pressed": String(follow), onclick: () => (follow ? pause() : resume()) }, "Follow");
  const level = h("select", { "aria-label": "Level", onchange: filter },
    [["", "info and above"], ["0", "with steps, debug"], ["2", "warnings, retries"], ["3", "errors only"]].map(([value, name]) => h("option", { value, selected: params.get("level") === value }, name)));
  const search = h("input", { type: "search", "aria-label": "Search the log", placeholder: "search", value: params.get("q") ?? "", oninput: () => { clearTimeout(timer); timer = setTimeout(filter, 200); } });
  const note = h("span", { class: "quiet figures", role: "status" });
  const whole = h("button", { class: "link", type: "button", hidden: true, onclick: searchWhole }, "search all that is stored");
  const below = h("button", { class: "below", type: "button", hidden: true, onclick: resume });
  const element = h("section", { class: "logs" }, h("div", { class: "bar-top" }, h("h2", {}, "Log"), h("div", { class: "filters" }, toggle, level, search, note, whole)),
    h("div", { class: "frame" }, box, below));

  const matches = (line) => (LEVELS[line.data.level] ?? LEVELS[line.type] ?? 1) >= Number(level.value || 1)
    && (!search.value || `${line.data.key ?? ""} ${wordsOf(line)}`.toLowerCase().includes(search.value.toLowerCase()));

  function filter() {
    address.write({ level: level.value, q: search.value });
    found = lines.filter(matches);
    isWhole = false;
    render(follow ? found.length : Math.min(found.length, from + SHOWN));
    if (follow) box.scrollTop = box.scrollHeight;
    say();
  }

  function say() {
    whole.hidden = isWhole || only || !search.value || nearest <= first;
    if (isWhole) put(note, `${count(found.length)} of all that is stored`);
    else put(note, search.value || level.value || found.length < lines.length ? `${count(found.length)} of ${many(lines.length, "line")}` : many(lines.length, "line"));
    const left = !only && lines.length && nearest > first ? nearest - first : 0;
    older.hidden = !(left && from === 0) || isWhole;
    put(older, `load older (${count(left)} before)`);
    put(below, fresh ? `${many(fresh, "new line")} ↓` : "to the end ↓");
    below.hidden = follow || (!fresh && !apart && to === found.length && atEnd());
    if (!found.length) fill(rows, `none${lines.length}`, h("p", { class: "quiet" }, lines.length ? "No line is like this." : "Nothing was logged yet. Lines of job.log appear here as they come."));
  }

  /** Lines with these words, also those that were never loaded: the first that many. */
  async function searchWhole() {
    const words = search.value;
    const some = [];
    let after = null;
    whole.disabled = true;
    try {
      do {
        const page = await get(`jobs/${job}/log`, { contains: words, after, limit: LOAD });
        some.push(...page.lines.map(({ id, event }) => ({ id, number: parseCursor(id).number, type: event.type, data: event })).filter(matches));
        after = page.next;
      } while (after && some.length < MOST && search.value === words);
    } catch (error) {
      return put(note, error.message);
    } finally {
      whole.disabled = false;
    }
    if (search.value !== words) return;
    [found, isWhole] = [some, true];
    pause();
    render(found.length);
    box.scrollTop = 0;
    say();
  }

  /** Have the lines up to index `end` in the document, and nothing jump. */
  function render(end) {
    const anchor = follow ? null : [...rows.children].find((row) => row.offsetTop + row.offsetHeight > box.scrollTop + box.offsetTop);
    const top = anchor?.getBoundingClientRect().top;
    [from, to] = [Math.max(0, end - SHOWN), end];
    const wanted = new Set(found.slice(from, to));
    for (const row of [...rows.children]) if (!wanted.has(row.line)) row.remove();
    delete rows.dataset.key;
    let place = rows.firstChild;
    for (const line of wanted) {
      line.row ??= rowOf(line);
      if (line.row === place) place = place.nextSibling;
      else rows.insertBefore(line.row, place);
    }
    for (const line of found.slice(Math.max(0, from - STEP * 5), from)) line.row = null;
    if (anchor?.isConnected) box.scrollTop += anchor.getBoundingClientRect().top - top;
  }

  const atEnd = () => box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
  function scrolled() {
    if (follow && !atEnd() && box.scrollTop < box.last) pause();
    else if (!follow && atEnd() && to === found.length && !apart && box.scrollTop > box.last) resume();
    else if (!follow && box.scrollTop < 200 && from > 0) render(Math.max(SHOWN, to - STEP));
    else if (!follow && box.scrollTop + box.clientHeight > box.scrollHeight - 200 && to < found.length) render(Math.min(found.length, to + STEP));
    box.last = box.scrollTop;
    say();
  }

  function pressed(e) {
    if (e.key === "Home") { pause(); render(Math.min(SHOWN, found.length)); box.scrollTop = 0; }
    else if (e.key === "End") resume();
    else return;
    e.preventDefault();
  }

  function pause() {
    follow = false;
    toggle.setAttribute("aria-pressed", "false");
    say();
  }

  async function resume() {
    follow = true;
    toggle.setAttribute("aria-pressed", "true");
    address.write({ line: "" });
    if (apart) {
      apart = false;
      clear();
      keep(await range("newest"));
    }
    fresh = 0;
    render(found.length);
    box.scrollTop = box.last = box.scrollHeight;
    say();
  }

  function clear() {
    lines = [];
    found = [];
    known.clear();
    rows.replaceChildren();
  }

  /** Take lines in; those that are there already are left out. Older ones go before. */
  function keep(some, before = false) {
    const taken = some.filter((line) => !known.has(line.id));
    for (const line of taken) {
      known.add(line.id);
      if (line.data.key !== undefined && !only) box.classList.remove("only");
    }
    lines = before ? [...taken, ...lines] : [...lines, ...taken];
    nearest = parseCursor(lines[0]?.id)?.number ?? 0;
    const last = isWhole ? found.at(-1)?.number ?? 0 : 0; // a search may have been quicker
    const hits = taken.filter((line) => matches(line) && line.number > last);
    if (before) { found = [...hits, ...found]; from += hits.length; to += hits.length; }
    else found.push(...hits);
    return hits.length;
  }

  /** Stored lines after a cursor, read until `until` or until there is no more at once. */
  async function range(after, until = Infinity) {
    const abort = new AbortController();
    const some = [];
    let [text, idle] = ["", setTimeout(() => abort.abort(), 4000)];
    try {
      const answer = await fetch(url(`jobs/${only ?? job}/events`, { after }), { headers: { accept: "application/x-ndjson" }, signal: abort.signal });
      if (answer.status !== 200) return some;
      for await (const chunk of chunksOf(answer.body.pipeThrough(new TextDecoderStream()))) {
        const parts = (text + chunk).split("\n");
        text = parts.pop();
        for (const part of parts.filter((one) => one.startsWith("{"))) {
          const { id, stream, ...data } = JSON.parse(part);
          const number = parseCursor(id)?.number;
          if (number > until || some.length >= LOAD) return some;
          some.push({ id, number, type: data.type === "progress" ? "step" : data.type, data });
        }
        clearTimeout(idle);
        idle = setTimeout(() => abort.abort(), 700);
      }
    } catch (error) {
      if (!abort.signal.aborted) throw error;
    } finally {
      clearTimeout(idle);
      abort.abort();
    }
    return some;
  }

  async function loadOlder() {
    older.disabled = true;
    const generation = parseCursor(lines[0].id).generation;
    const start = Math.max(first - 1, nearest - 1 - LOAD);
    const some = await range(`${generation}.${start}`, nearest - 1).finally(() => { older.disabled = false; });
    follow = false;
    const height = box.scrollHeight;
    keep(some, true);
    nearest = start + 1;
    render(Math.min(found.length, Math.max(SHOWN, from + STEP)));
    if (!box.scrollTop) box.scrollTop = box.scrollHeight - height;
    pause();
  }

  function rowOf(line) {
    const { data, type } = line;
    const mood = type === "failed" || data.level === "error" ? "bad" : LEVELS[type] === 2 || data.level === "warning" ? "warn" : type === "step" || data.level === "debug" ? "quiet" : "";
    const text = h("span", { class: "text" }, data.truncated ? shortened(line) : long(wordsOf(line), FINEST));
    const time = h("a", { href: `#/jobs/${job}?line=${line.id}`, class: "at", title: data.at ? `${exact(data.at)} · event ${line.id}` : line.id,
      onclick: (e) => { if (!e.ctrlKey && !e.metaKey) { e.preventDefault(); pause(); address.write({ line: line.id }); point(line.id); } } }, data.at ? atSecond(data.at) : "");
    const who = data.key !== undefined && !only ? h("a", { class: "who", href: `#/jobs/${data.job}`, title: visible(data.key) }, said(tail(data.key))) : h("span", { class: "who" });
    const row = h("div", { class: `line ${mood}` }, time, who, mood === "bad" || mood === "warn" ? h("b", { class: "level" }, type === "log" ? data.level : type) : null, text);
    row.line = line;
    return row;
  }

  function shortened(line) {
    const open = h("button", { class: "link", type: "button", onclick: async () => {
      open.disabled = true;
      try {
        whole.replaceWith(said((await get(`jobs/${job}/events/${line.number}`)).message));
      } catch (error) {
        open.replaceWith(said(error.message));
      }
    } }, `open all ${count(line.data.bytes)} bytes`);
    const whole = h("span", {}, said(wordsOf(line).slice(0, FINEST)), "… ", open);
    return whole;
  }

  function point(id) {
    for (const row of rows.children) row.classList.toggle("pointed", row.line?.id === id);
    rows.querySelector(".pointed")?.scrollIntoView({ block: "center" });
  }

  let waiting = [];
  let due = 0;
  function flush() {
    due = 0;
    const some = waiting;
    waiting = [];
    if (apart || (!follow && lines.length >= MOST)) {
      apart = true;
      fresh += some.length;
      return say();
    }
    const hits = keep(some);
    if (follow) {
      if (lines.length > MOST) {
        for (const line of lines.splice(0, lines.length - MOST + LOAD)) known.delete(line.id);
        nearest = lines[0].number;
        found = lines.filter(matches);
      }
      render(found.length);
      box.scrollTop = box.last = box.scrollHeight;
    } else fresh += hits;
    say();
  }

  const line = params.get("line");
  if (line && parseCursor(line)) {
    apart = true;
    const { generation, number } = parseCursor(line);
    range(`${generation}.${Math.max(0, number - 200)}`).then((some) => {
      keep(some);
      const index = found.findIndex((l) => l.id === line);
      render(Math.min(found.length, Math.max(SHOWN, index + 100)));
      point(line);
      say();
    }).catch(() => say());
  }
  say();

  return {
    element,
    hello(head) { first = head.first; },
    /** Show this line, wherever it is. */
    go(line) {
      if (!line || rows.querySelector(".pointed")?.line.id === line) return;
      if (known.has(line)) {
        pause();
        render(Math.min(found.length, Math.max(SHOWN, found.findIndex((l) => l.id === line) + STEP)));
        point(line);
      } else location.reload();
    },
    add(event) {
      if (only && event.data.job !== only && event.type !== "end") return;
      waiting.push(event);
      due ||= setTimeout(flush, 150);
    },
  };
}

async function* chunksOf(stream) {
  const reader = stream.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

function wordsOf({ type, data }) {
  if (type === "step") return `${count(data.done ?? 0)} of ${count(data.of ?? 0)}${data.message ? ` · ${data.message}` : ""}`;
  if (type === "dropped") return `${many(data.count ?? 0, "line")} lost here: they came faster than they could be stored`;
  if (type === "reset") return `what was before ${data.from} is no longer kept (${data.reason})`;
  if (type === "reopened") return "opened again: failed children are tried once more";
  if (type === "end") return `ended${data.status ? `: ${data.status}` : ""}`;
  if (type === "retry" && data.delay !== undefined) return `${data.message ?? "failed"}, again in ${Math.round(data.delay)} s`;
  const { message = "", ...more } = data;
  const extra = Object.entries(more.fields ?? more.extra ?? {}).map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`);
  return [String(message), ...extra].join("  ");
}
