/** The API as the page sees it, and how current what it says is. */

import { clock, said, h } from "./dom.js";

export const base = new URL("../", import.meta.url).href;
export const about = { scopes: null, auth: "none" };

export class Problem extends Error {
  constructor(status, body = {}) {
    super([body.detail || body.title || `the server answered ${status}`, body.remedy].filter(Boolean).join(". "));
    Object.assign(this, { status, field: body.field, id: body.request_id, title: body.title });
  }
}

export const url = (path, query = {}) => {
  const address = new URL(`v1/${path}`, base);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") address.searchParams.set(name, value);
  }
  return address.href;
};

async function ask(method, path, { query, body, headers } = {}) {
  let answer;
  try {
    answer = await fetch(url(path, query), {
      method,
      signal: AbortSignal.timeout(20000),
      headers: { accept: "application/json", ...(body && { "content-type": "application/json" }), ...headers },
      body: body && JSON.stringify(body),
    });
  } catch {
    throw new Problem(0, { detail: "The server does not answer" });
  }
  const date = Date.parse(answer.headers.get("date"));
  if (date && Math.abs(date - Date.now()) > 2000) clock.skew = date - Date.now();
  const value = answer.status === 204 ? null : await answer.json().catch(() => null);
  if (!answer.ok) throw new Problem(answer.status, value ?? {});
  return { value, status: answer.status };
}

export const get = async (path, query) => (await ask("GET", path, { query })).value;
export const send = (method, path, body, headers) => ask(method, path, { body, headers });
export const post = async (path, body = {}) => (await send("POST", path, body)).value;

/** May this person do that? Unknown counts as yes: the server decides. */
export const may = (scope) => !about.scopes?.length || about.scopes.includes(scope);
export const mayNot = (scope) => (may(scope) ? "" : `Your key is not good for this: it lacks the scope ${scope}.`);

// -- the connection, always visible -----------------------------------------------------------------

const sources = new Map();
let lostSince = null;
let timer = 0;

/** `source` is a name ("poll", "log"); state as of fanout-events, or null: it is no more. */
export function report(source, state) {
  if (state) sources.set(source, state);
  else sources.delete(source);
  clearTimeout(timer);
  timer = setTimeout(paint, 120);
}

const time = (at) => new Date(at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

function paint() {
  const states = [...sources.values()];
  const lost = states.filter((s) => s.state === "lost");
  const waiting = states.find((s) => s.state === "catching up") ?? states.find((s) => s.state === "connecting");
  let [kind, words] = ["ok", "live"];
  if (lost.length) {
    lostSince = Math.min(...lost.map((s) => s.since));
    [kind, words] = ["lost", `lost since ${time(lostSince)} (trying)`];
  } else if (waiting) {
    [kind, words] = ["wait", waiting.behind ? `catching up (${waiting.behind.toLocaleString("en")} behind)` : waiting.state];
  } else if (states.some((s) => s.state === "paused")) [kind, words] = ["wait", "paused: this tab was hidden"];
  else if (states.some((s) => s.state === "ended")) [kind, words] = ["ended", "ended: nothing more will come"];
  const element = document.getElementById("connection");
  element.className = kind;
  const state = document.getElementById("state");
  if (state.textContent !== words) state.textContent = words;
  document.body.classList.toggle("stale", kind === "lost");
  document.body.dataset.lost = kind === "lost" ? `Not connected. What you see is from ${time(lostSince)}; it catches up by itself.` : "";
}

/**
 * Run `look` now and every `seconds` (or as many as it returns; null: never again), while the page is
 * visible; after failures less often. Returns { stop, soon }.
 */
export function poll(look, seconds, failed = () => {}) {
  let [stopped, running, again, failures, timer] = [false, false, false, 0, 0];
  const name = Symbol("poll");
  const run = async () => {
    clearTimeout(timer);
    if (stopped || document.hidden) return;
    if (running) { again = true; return; }
    running = true;
    let pause = seconds;
    try {
      pause = (await look()) ?? seconds;
      failures = 0;
      if (!stopped) report(name, { state: "live" });
    } catch (error) {
      failures++;
      pause = Math.min(30, 2 ** failures);
      if (!stopped) {
        if (error.status === 0 || error.status >= 500) report(name, { state: "lost", since: Date.now() });
        else if (!(error instanceof Problem)) console.error(error);
        if (failed(error) === false) return stop();
      }
    } finally {
      running = false;
    }
    if (stopped || pause === Infinity) return;
    timer = setTimeout(run, again ? 0 : pause * 1000);
    again = false;
  };
  const seen = () => document.hidden || run();
  const stop = () => {
    stopped = true;
    clearTimeout(timer);
    report(name, null);
    removeEventListener("visibilitychange", seen, true);
  };
  addEventListener("visibilitychange", seen, true);
  run();
  return { stop, soon: run };
}

/** A download; the browser writes it to disk as it comes. */
export const download = (label, path, query) => h("a", { href: url(path, query), download: "" }, label);

/** What went wrong, for a person. */
export function trouble(error) {
  const [title, text] = {
    0: ["The server does not answer", "It is tried again every few seconds; nothing is lost meanwhile."],
    401: ["Please sign in", ""],
    403: ["Not allowed", "Your key does not have the scope for this. Ask whoever gave it to you."],
    404: ["Not here", "There is no such job, or it is not yours to see."],
  }[error.status] ?? ["Something went wrong", ""];
  return h("section", { class: "empty", role: "alert" }, h("h1", {}, title), h("p", {}, text || said(error.message)),
    text && error.status && h("p", { class: "quiet" }, said(error.message)), error.id && h("p", { class: "quiet" }, "Request ", said(error.id)),
    h("p", {}, h("a", { href: "#/" }, "All batches")));
}
