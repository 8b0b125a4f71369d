/**
 * Live events of fanout jobs, in any page, without a dependency.
 *
 *   import { FanoutEvents } from "./fanout-events.js";
 *   const events = new FanoutEvents({ jobs: [12, 13], start: "newest" });
 *   events.on("log", ({ stream, id, data }) => console.log(id, data.key, data.message));
 *   events.on("progress", ({ data }) => bar.value = data.percent);
 *   events.on("status", ({ state, behind, since }) => …);
 *   new FanoutEvents({ jobs, start: "progress" }); // only counters and the end, as for a list
 *   events.close();
 *
 * Events: log, step (a job's own progress), failed, retry, dropped (lines a full buffer lost), end,
 * reset (what was between is no longer kept), progress (the batch's counters), status.
 *
 * What it does that EventSource does not: it notices a silent connection, comes back after an answer
 * that ends an EventSource for good, hands out each event once, follows up to 32 jobs in one stream,
 * shares that stream between the tabs of a browser (which has six connections to a host over
 * HTTP/1.1), lets go of it in a tab that is hidden for long, and says how current it is.
 */

const NUMBERED = ["log", "step", "failed", "retry", "dropped", "reopened", "end"];
const FRAMES = ["hello", "hb", "bye", "reset", "progress", ...NUMBERED];
const MOST_JOBS = 32;
const NEWEST = 1000; // lines that the server gives for "newest"
const PROGRESS = "progress"; // a start: only progress and the end, as a list of batches wants it
const LONGEST_PAUSE = 20000;

/** Milliseconds before try number `tries` (1, 2, …): doubled each time, half of it by chance. */
export function pauseBefore(tries, random = Math.random) {
  const whole = Math.min(LONGEST_PAUSE, 1000 * 2 ** Math.min(tries - 1, 10));
  return whole / 2 + (random() * whole) / 2;
}

/** "g.n" as { generation, number }, or null. */
export function parseCursor(text) {
  const found = /^(\d{1,9})\.(\d{1,16})$/.exec(text ?? "");
  return found && { generation: Number(found[1]), number: Number(found[2]) };
}

/** An SSE id, "g.n" or "job:g.n_job:g.n", as a Map of job → cursor; `only` names the one job. */
export function parseId(text, only) {
  const cursors = new Map();
  for (const part of (text || "").split("_")) {
    const [head, tail] = part.split(":");
    const cursor = parseCursor(tail ?? head);
    const job = tail === undefined ? only : Number(head);
    if (cursor && job) cursors.set(job, cursor);
  }
  return cursors;
}

/** The address that follows `starts`: a Map of job → "g.n", "newest", "progress", or null (from the first). */
export function streamUrl(base, starts) {
  const jobs = [...starts];
  const [[job, after]] = jobs;
  if (jobs.length === 1 && after !== PROGRESS) {
    return new URL(`v1/jobs/${job}/events${after ? `?after=${after}` : ""}`, base).href;
  }
  const query = jobs.map(([job, after]) => `s=${job}${after ? `:${after}` : ""}`).join("&");
  return new URL(`v1/streams?${query}`, base).href;
}

/** How far a reader is in one stream. Takes each event once; knows how many it lacks. */
export class Place {
  constructor(start = null) {
    this.start = start;
    this.generation = 0;
    this.number = 0;
    this.last = 0;
    this.ended = false;
    const cursor = parseCursor(start);
    if (cursor) Object.assign(this, cursor);
  }

  get cursor() {
    return this.generation && this.start !== PROGRESS ? `${this.generation}.${this.number}` : this.start;
  }

  get behind() {
    return Math.max(0, this.last - this.number);
  }

  /** The server begins: is there a gap between what was seen and what will come? */
  hello({ generation, last, after }) {
    if (!this.generation || this.start === PROGRESS) Object.assign(this, { generation, number: after });
    this.last = last;
    return generation === this.generation && after > this.number;
  }

  /** Is this event new? */
  take({ generation, number }) {
    if (generation < this.generation) return false;
    if (generation === this.generation && number <= this.number) return false;
    Object.assign(this, { generation, number });
    this.last = Math.max(this.last, number);
    return true;
  }

  /** The server skips to `from`. False: that was seen already. */
  reset(from) {
    const { generation, number } = parseCursor(from) ?? { generation: 0, number: 0 };
    if (generation === this.generation && number - 1 <= this.number) return false;
    Object.assign(this, { generation, number: number - 1, ended: false });
    return true;
  }
}

/** One EventSource that does not stay silent, nor closed. Hands frames and states to `tell`. */
class Connection {
  constructor(url, silence, tell) {
    Object.assign(this, { url, silence, tell, tries: 0, heardAt: Date.now() });
    this.open();
    this.watch = setInterval(() => {
      if (Date.now() - this.heardAt > this.silence * 1000) this.again();
    }, 1000);
  }

  open() {
    this.source = new EventSource(this.url(), { withCredentials: true });
    for (const name of FRAMES) this.source.addEventListener(name, (e) => this.frame(name, e));
    this.source.onerror = () => this.lost();
  }

  frame(name, { lastEventId, data }) {
    if (data === undefined) return; // a connection error that is called like an event
    this.heardAt = Date.now();
    this.tries = 0;
    this.tell({ frame: name, id: lastEventId, data });
  }

  lost() {
    this.tell({ state: "lost", since: Date.now() });
    if (this.source.readyState !== EventSource.CLOSED) return; // the browser tries by itself
    this.source.close();
    this.ask();
  }

  /** An EventSource does not tell which answer ended it; fetch does. */
  async ask() {
    const source = this.source;
    const abort = new AbortController();
    let status = 0;
    try {
      const headers = { accept: "text/event-stream" };
      const options = { headers, credentials: "include", signal: abort.signal };
      status = (await fetch(this.url(), options)).status;
    } catch {
      // no answer: try again
    }
    abort.abort();
    if (source !== this.source || !this.watch) return;
    if (status === 204) this.tell({ state: "ended" });
    else if ([401, 403, 404].includes(status)) this.tell({ state: "refused", status });
    else this.timer = setTimeout(() => this.again(), pauseBefore(++this.tries));
  }

  again() {
    this.tell({ state: "lost", since: this.heardAt });
    this.heardAt = Date.now();
    this.source.close();
    clearTimeout(this.timer);
    this.open();
  }

  close() {
    this.source.close();
    clearInterval(this.watch);
    clearTimeout(this.timer);
    this.watch = null;
  }
}

/** Who of several tabs holds the stream: a lock where there are locks, else who says so loudest. */
class Leadership {
  constructor(name, me, post, lead) {
    Object.assign(this, { name, me, post, lead, leading: false, heardAt: Date.now() });
    if (navigator.locks) {
      this.abort = new AbortController();
      const hold = () => this.abort && new Promise((done) => {
        this.done = done;
        this.begin();
      });
      navigator.locks.request(name, { signal: this.abort.signal }, hold).catch(() => {});
    } else {
      this.patience = 1500 + Math.random() * 1500;
      this.heardAt -= this.patience - Math.random() * 300;
      this.timer = setInterval(() => {
        if (this.leading) this.post({ beat: this.me });
        else if (Date.now() - this.heardAt > this.patience) this.begin();
      }, 500);
    }
  }

  begin() {
    this.leading = true;
    this.post({ beat: this.me });
    this.lead(true);
  }

  /** Without locks two may lead for a moment: the lower name stays. */
  heard(beat) {
    this.heardAt = beat ? Date.now() : 0;
    if (!this.timer || !this.leading || !beat || beat > this.me) return;
    this.leading = false;
    this.lead(false);
  }

  resign() {
    clearInterval(this.timer);
    this.abort?.abort();
    this.abort = null;
    this.done?.();
    if (this.leading) this.post({ beat: null });
    this.leading = false;
  }
}

export class FanoutEvents {
  #options;
  #places = new Map();
  #listeners = new Map();
  #me = Math.random().toString(36).slice(2);
  #wish = 0; // how often what we want has changed
  #served = -1; // the wish that the stream we hear was opened for
  #status = { state: "connecting", behind: 0, since: Date.now() };
  #channel = null;
  #leadership = null;
  #connection = null;
  #wants = new Map(); // leading: tab → { wish, jobs, at }
  #asked = new Map(); // leading: tab → wish, of the connection that is open
  #reached = new Map(); // leading: job → Place of the connection
  #timers = new Map();
  #paused = false;
  #closed = false;
  #heardAt = Date.now();

  constructor(options = {}) {
    this.#options = {
      base: new URL("../", import.meta.url).href, start: null, after: {},
      share: true, silence: 45, hidden: 60, ...options,
    };
    for (const job of this.#options.jobs ?? []) this.#place(job);
    for (const name of ["visibilitychange", "pagehide", "pageshow"]) {
      addEventListener(name, this.#seen, true);
    }
    this.#join();
  }

  /** What is known of the connection: { state, behind, since, status? }. */
  get status() {
    return this.#status;
  }

  /** Call `listener` with every event of this name; returns how to stop that. */
  on(name, listener) {
    const listeners = this.#listeners.get(name) ?? new Set();
    this.#listeners.set(name, listeners.add(listener));
    return () => listeners.delete(listener);
  }

  /** Follow one more job, or one that has ended and was begun again. */
  follow(job, after) {
    const place = this.#places.get(job);
    if (!place && this.#places.size >= MOST_JOBS) throw new RangeError("at most 32 jobs");
    if (place) place.ended = false;
    else this.#place(job, after);
    this.#changed();
  }

  /** Follow it no longer. */
  unfollow(job) {
    if (this.#places.delete(job)) this.#changed();
  }

  /** The cursor after which this job goes on: "generation.number". */
  cursor(job) {
    return this.#places.get(job)?.cursor ?? null;
  }

  /** Connect again now, as after signing in. */
  retry() {
    this.#changed();
  }

  close() {
    this.#closed = true;
    for (const name of ["visibilitychange", "pagehide", "pageshow"]) {
      removeEventListener(name, this.#seen, true);
    }
    this.#leave();
  }

  #place(job, after = this.#options.after[job] ?? this.#options.start) {
    this.#places.set(Number(job), new Place(after));
  }

  // -- joining and leaving ------------------------------------------------------------------------

  #join() {
    this.#paused = false;
    this.#heardAt = Date.now();
    this.#every("check", 1000, () => this.#check());
    if (!this.#options.share || !globalThis.BroadcastChannel) {
      this.#leadership = { leading: true, resign() {}, heard() {} };
    } else {
      const name = `fanout-events ${this.#options.base}`;
      this.#channel = new BroadcastChannel(name);
      this.#channel.onmessage = ({ data }) => this.#heard(data);
      const lead = (leading) => this.#lead(leading);
      this.#leadership = new Leadership(name, this.#me, (message) => this.#post(message), lead);
    }
    this.#changed();
  }

  #leave() {
    for (const timer of this.#timers.values()) clearInterval(timer);
    this.#timers.clear();
    this.#disconnect();
    this.#post({ left: this.#me });
    this.#leadership?.resign();
    this.#leadership = null;
    this.#channel?.close();
    this.#channel = null;
    this.#wants.clear();
  }

  #seen = ({ type }) => {
    const hide = type === "pagehide";
    if (this.#closed) return;
    if (hide || document.hidden) {
      const pause = () => {
        if (!this.#paused) this.#leave();
        this.#paused = true;
        this.#say({ state: "paused", since: Date.now() });
      };
      if (hide) pause();
      else this.#timers.set("hide", setTimeout(pause, this.#options.hidden * 1000));
    } else {
      clearTimeout(this.#timers.get("hide"));
      if (this.#paused) this.#join();
    }
  };

  #every(name, ms, run) {
    clearInterval(this.#timers.get(name));
    this.#timers.set(name, setInterval(run, ms));
  }

  /** What we want has changed: say so to whoever leads. */
  #changed() {
    if (this.#paused || this.#closed) return;
    this.#wish++;
    const open = [...this.#places].filter(([, place]) => !place.ended);
    const jobs = open.map(([job, place]) => [job, place.cursor]);
    if (!jobs.length && this.#places.size) this.#say({ state: "ended" });
    else if (this.#status.state !== "lost") this.#say({ state: "connecting", since: Date.now() });
    const want = { want: this.#me, wish: this.#wish, jobs };
    this.#post(want);
    this.#wanted(want);
  }

  /** A tab that follows hears by its leader; silence means that both are gone. */
  #check() {
    const silent = Date.now() - this.#heardAt > (this.#options.silence + 5) * 1000;
    if (this.#leadership?.leading || !silent || this.#status.state === "ended") return;
    if (this.#status.state !== "refused") this.#say({ state: "lost", since: this.#heardAt });
    this.#heardAt = Date.now();
    this.#changed();
  }

  // -- between tabs -------------------------------------------------------------------------------

  #post(message) {
    this.#channel?.postMessage(message);
  }

  #heard(message) {
    if ("beat" in message) {
      this.#leadership?.heard(message.beat);
      if (message.first) this.#changed();
    } else if (message.want) this.#wanted(message);
    else if (message.left) {
      if (this.#wants.delete(message.left)) this.#reopen(5000);
    } else if (!this.#leadership?.leading) this.#take(message);
  }

  /** Leading: everybody says what they want, and gets it through one connection. */
  #lead(leading) {
    this.#disconnect();
    this.#wants.clear();
    if (!leading) return;
    this.#post({ beat: this.#me, first: true });
    this.#changed();
  }

  #wanted({ want, wish, jobs }) {
    if (!this.#leadership?.leading) return;
    this.#wants.set(want, { wish, jobs });
    this.#reopen(want === this.#me && this.#wants.size === 1 ? 0 : 60);
  }

  #reopen(ms) {
    if (!this.#leadership?.leading) return;
    clearTimeout(this.#timers.get("reopen"));
    this.#timers.set("reopen", setTimeout(() => this.#connect(), ms));
  }

  #connect() {
    this.#connection?.close();
    this.#connection = null;
    const starts = this.#starts();
    if (!starts.size) return;
    for (const job of this.#reached.keys()) if (!starts.has(job)) this.#reached.delete(job);
    for (const [job, start] of starts) this.#reached.set(job, new Place(start));
    this.#asked = new Map([...this.#wants].map(([tab, { wish }]) => [tab, wish]));
    const url = () => streamUrl(
      this.#options.base,
      [...this.#reached].filter(([, p]) => !p.ended).map(([job, p]) => [job, p.cursor]),
    );
    this.#connection = new Connection(url, this.#options.silence, (m) => this.#spread(m));
  }

  #disconnect() {
    clearTimeout(this.#timers.get("reopen"));
    this.#connection?.close();
    this.#connection = null;
    this.#reached.clear();
  }

  /** Job → where to begin, so that nobody lacks anything: the lowest of what each tab has seen. */
  #starts() {
    const starts = new Map();
    for (const [tab, { wish, jobs }] of this.#wants) {
      for (const [job, cursor] of jobs) {
        const reached = this.#reached.get(job);
        const known = reached?.generation ? reached : null;
        let start = this.#asked.get(tab) === wish && known && cursor !== PROGRESS ? known.cursor : cursor;
        if (start === "newest" && known) {
          const number = Math.min(known.number, Math.max(0, known.last - NEWEST));
          start = `${known.generation}.${number}`;
        }
        starts.set(job, starts.has(job) ? lower(starts.get(job), start) : start);
      }
    }
    // Too many for one stream: those that are only counted go first.
    const order = ([, one], [, other]) => (one === PROGRESS) - (other === PROGRESS);
    return new Map([...starts].sort(order).slice(0, MOST_JOBS));
  }

  /** Leading: what the connection says, for all tabs. */
  #spread(message) {
    if (message.frame) {
      const only = this.#reached.size === 1 ? this.#reached.keys().next().value : undefined;
      message.only = only;
      if (message.frame === "hello") {
        for (const stream of JSON.parse(message.data).streams) {
          this.#reached.get(only ?? stream.job)?.hello(stream);
        }
        message.served = [...this.#asked];
      } else if (message.frame === "reset") {
        const { job, from } = JSON.parse(message.data);
        this.#reached.get(only ?? job)?.reset(from);
      } else {
        for (const [job, cursor] of parseId(message.id, only)) this.#reached.get(job)?.take(cursor);
      }
    }
    this.#post(message);
    this.#take(message);
    if (message.frame === "end") {
      const { stream = message.only } = JSON.parse(message.data);
      if (this.#reached.has(stream)) this.#reached.get(stream).ended = true;
      if ([...this.#reached.values()].every((place) => place.ended)) this.#disconnect();
    }
  }

  // -- what is heard ------------------------------------------------------------------------------

  #take(message) {
    this.#heardAt = Date.now();
    if (message.state) {
      if (this.#places.size && this.#status.state !== "ended") this.#say(message);
      return;
    }
    if (message.served) {
      this.#served = new Map(message.served).get(this.#me) ?? -1;
    }
    if (this.#served !== this.#wish) return; // a stream that does not begin where we are
    let data;
    try {
      data = JSON.parse(message.data);
    } catch {
      return;
    }
    if (message.frame === "hello") this.#hello(data.streams, message.only);
    else if (message.frame === "reset") this.#reset(data, message.only);
    else if (message.frame === "progress") {
      if (this.#places.has(data.id)) this.#emit("progress", { stream: data.id, data });
    } else if (message.frame === "hb") {
      for (const [job, cursor] of parseId(message.id, message.only)) {
        this.#places.get(job)?.take(cursor);
      }
    } else if (NUMBERED.includes(message.frame)) this.#event(message, data);
    else if (message.frame === "bye") this.#say({ state: "lost", since: Date.now() });
    if (message.frame !== "bye") this.#current();
  }

  #hello(streams, only) {
    let gap = false;
    for (const stream of streams) {
      const place = this.#places.get(only ?? stream.job);
      // A child's stream is its root's, filtered: its numbers have gaps, and no last one.
      if (only && only !== stream.job) stream.last = stream.after;
      gap = place?.hello(stream) || gap;
    }
    if (gap) this.#changed();
    this.#emit("hello", { streams });
  }

  #reset(data, only) {
    const stream = only ?? data.job;
    if (this.#places.get(stream)?.reset(data.from)) this.#emit("reset", { stream, data });
  }

  #event({ frame, id, only }, data) {
    const stream = only ?? data.stream;
    const place = this.#places.get(stream);
    const cursor = parseId(id, only).get(stream);
    if (!place || !cursor || !place.take(cursor)) return;
    this.#emit(frame, { type: frame, stream, id: place.cursor, number: cursor.number, data });
    if (frame === "end") place.ended = true;
  }

  #current() {
    const places = [...this.#places.values()];
    const behind = places.reduce((sum, place) => sum + place.behind, 0);
    if (places.every((place) => place.ended)) this.#say({ state: "ended" });
    else this.#say({ state: behind ? "catching up" : "live", behind });
  }

  #say({ state, behind = 0, since, status }) {
    const was = this.#status;
    if (was.state === state && was.behind === behind) return;
    if (state === "lost" && was.state === "lost") since = was.since;
    this.#status = { state, behind, since: since ?? Date.now(), status };
    this.#emit("status", this.#status);
  }

  #emit(name, event) {
    for (const listener of this.#listeners.get(name) ?? []) {
      try {
        listener(event);
      } catch (error) {
        reportError(error);
      }
    }
  }
}

/** The lower of two places to begin: null is the first event, "newest" is above every number, "progress" above all. */
export function lower(one, other) {
  if (one === null || other === null) return null;
  if (one === PROGRESS || other === PROGRESS) return one === PROGRESS ? other : one;
  const [a, b] = [parseCursor(one), parseCursor(other)];
  if (!a || !b) return a ? one : other;
  const order = a.generation - b.generation || a.number - b.number;
  return order <= 0 ? one : other;
}
