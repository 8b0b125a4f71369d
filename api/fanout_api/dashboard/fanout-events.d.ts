/** Live events of fanout jobs. See `fanout-events.js` for what it does beyond EventSource. */

/** A place in a stream: "generation.number". */
export type Cursor = `${number}.${number}`;

/** Where to begin: after a cursor, at the newest thousand events, or (null) at the first one kept.
 * "progress": no events but progress and the end, which costs the workers nothing. */
export type Start = Cursor | "newest" | "progress" | null;

export interface Options {
  /** Ids of root jobs, or one child's alone (with `share: false`). At most 32. */
  jobs?: Iterable<number>;
  /** Where a job without an entry in `after` begins. Default null. */
  start?: Start;
  /** Job id → where it begins: what `cursor()` said when the page was left. */
  after?: Record<number, Start>;
  /** The address of the API, with a slash at the end. Default: where this module comes from. */
  base?: string;
  /** Share one connection between the tabs and objects of this origin. Default true. */
  share?: boolean;
  /** Seconds without a frame after which the connection is made anew. The server's heart beats every
   * 15. Default 45. */
  silence?: number;
  /** Seconds after which a hidden tab lets go of the stream; it catches up when it is seen. Default 60. */
  hidden?: number;
}

export type State =
  | "connecting"
  | "live"
  | "catching up" // `behind` events are to come
  | "lost" // since `since`; it is tried again
  | "paused" // the tab is hidden
  | "ended" // nothing more will come
  | "refused"; // `status` 401, 403 or 404: `retry()` after signing in

export interface Status {
  state: State;
  behind: number;
  /** Milliseconds since 1970. */
  since: number;
  status?: number;
}

/** A stored event. Each is handed out once, in the order of numbers. */
export interface StoredEvent {
  type: "log" | "step" | "failed" | "retry" | "dropped" | "reopened" | "end";
  /** The job that was followed. */
  stream: number;
  id: Cursor;
  number: number;
  data: {
    type: string;
    /** Milliseconds since 1970. */
    at?: number;
    /** The job that says it, and its document's key. */
    job?: number;
    key?: string;
    attempt?: number;
    level?: "debug" | "info" | "warning" | "error";
    message?: string;
    /** The message was cut: all `bytes` of it are at v1/jobs/{stream}/events/{number}. */
    truncated?: true;
    bytes?: number;
    /** Of `step`. */
    done?: number;
    of?: number | null;
    /** Of `retry`: seconds. */
    delay?: number;
    /** Of `dropped`: lines that a full buffer lost. */
    count?: number;
    [field: string]: unknown;
  };
}

export interface Progress {
  id: number;
  status: string;
  total: number;
  completed: number;
  failed: number;
  cancelled: number;
  processing: number;
  pending: number;
  /** Rounded down; 100 only when closed. */
  percent: number;
  rate_per_second: number | null;
  eta_seconds: [number, number] | null;
  outcome: string;
  generation: number;
  waits_for: string[];
  reason: string | null;
}

export interface EventMap {
  log: StoredEvent;
  step: StoredEvent;
  failed: StoredEvent;
  retry: StoredEvent;
  dropped: StoredEvent;
  end: StoredEvent;
  /** What was before `from` is no longer kept, or the job was opened again. */
  reset: { stream: number; data: { job: number; from: Cursor; seen: string; reason: "pruned" | "generation" } };
  /** Committed counters, a few times a second at most, when they have changed. Not numbered. */
  progress: { stream: number; data: Progress };
  /** A connection begins. */
  hello: { streams: { job: number; generation: number; first: number; last: number; after: number; gap: boolean; closed: boolean }[] };
  status: Status;
}

export class FanoutEvents {
  constructor(options?: Options);
  readonly status: Status;
  /** Returns a function that stops it. */
  on<Name extends keyof EventMap>(name: Name, listener: (event: EventMap[Name]) => void): () => void;
  /** Follow one more job, or one that has ended and was opened again. */
  follow(job: number, after?: Start): void;
  unfollow(job: number): void;
  /** Where this job's events go on. */
  cursor(job: number): Start;
  /** Connect again now, as after signing in. */
  retry(): void;
  close(): void;
}

// What the class is made of, pure; exported for tests.
export function pauseBefore(tries: number, random?: () => number): number;
export function parseCursor(text: string | null | undefined): { generation: number; number: number } | null;
export function parseId(text: string, only?: number): Map<number, { generation: number; number: number }>;
export function streamUrl(base: string, starts: Iterable<[number, Start]>): string;
export function lower(one: Start, other: Start): Start;
export class Place {
  constructor(start?: Start);
  readonly cursor: Start;
  readonly behind: number;
  last: number;
  ended: boolean;
  hello(head: { generation: number; last: number; after: number }): boolean;
  take(cursor: { generation: number; number: number }): boolean;
  reset(from: Cursor): boolean;
}
