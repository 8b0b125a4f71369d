/** Which view the address asks for. The address holds the state: #/jobs/12?status=failed. */

import { banner } from "./alerts.js";
import { about, get, poll, send, trouble } from "./api.js";
import { h, many, put, said } from "./dom.js";
import { jobView } from "./job.js";
import { limitsView } from "./limits.js";
import { listView } from "./list.js";
import { schedulesView } from "./schedules.js";
import { workersView } from "./workers.js";
import { submitView } from "./submit.js";

const main = document.getElementById("main");
const VIEWS = [[/^\/$/, listView], [/^\/jobs\/(\d{1,18})$/, jobView], [/^\/workers$/, workersView],
  [/^\/limits$/, limitsView], [/^\/schedules$/, schedulesView], [/^\/submit$/, submitView]];
let shown = null;

/** What the address says: a path, and parameters that a view reads and writes. */
export const address = {
  read() {
    const [path, query] = (location.hash.slice(1) || "/").split("?");
    return { path, params: new URLSearchParams(query) };
  },
  /** Keep a view's state in the address; `push` makes a step that Back undoes. */
  write(changes, push = false) {
    const { path, params } = address.read();
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") params.delete(name);
      else params.set(name, value);
    }
    const hash = `#${path}${params.size ? `?${params}` : ""}`;
    if (hash !== location.hash) history[push ? "pushState" : "replaceState"](null, "", hash);
  },
};

/** A view is a function (context, ...ids) → { element, update?, stop? }. */
function show() {
  const { path, params } = address.read();
  if (shown?.path === path && shown.update) return shown.update(params);
  shown?.stop?.();
  const [ids, view] = VIEWS.map(([pattern, view]) => [pattern.exec(path), view]).find(([ids]) => ids) ?? [];
  shown = view ? view({ params, address, fail }, ...ids.slice(1)) : { element: trouble({ status: 404, message: "" }) };
  shown.path = path;
  main.replaceChildren(shown.element);
  if (!shown.named) document.title = `${main.querySelector("h1")?.textContent ?? "Batches"} · fanout`;
  for (const link of document.querySelectorAll("#top nav a")) {
    if (link.getAttribute("href") === `#${path}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
}

/** A view could not be shown. Returns false, which ends its polling, unless trying again may help. */
function fail(error) {
  if (error.status === 401) signIn();
  else if (error.status === 0 || error.status >= 500) {
    if (!main.querySelector("[data-ready]")) main.replaceChildren(trouble(error));
    return true;
  } else main.replaceChildren(trouble(error));
  return false;
}

function signIn() {
  shown?.stop?.();
  shown = null;
  const input = h("input", { id: "key", type: "password", autocomplete: "current-password", required: true });
  const wrong = h("p", { role: "alert", class: "bad" });
  const enter = async (e) => {
    e.preventDefault();
    try {
      await send("POST", "session", { key: input.value });
      begin();
    } catch (error) {
      wrong.replaceChildren(error.status === 401 ? "This key is not known here." : said(error.message));
      input.select();
    }
  };
  main.replaceChildren(h("form", { class: "empty", onsubmit: enter }, h("h1", {}, "Sign in"),
    h("p", {}, "This server asks for a key. It is kept in a cookie that no script can read."),
    h("label", { for: "key" }, "Key"), input, h("button", { class: "main" }, "Sign in"), wrong));
  input.focus();
}

async function signOut() {
  await send("DELETE", "session").catch(() => {});
  signIn();
}

let [introduction, alerts] = [null, null];
function begin() {
  introduction?.stop();
  alerts?.stop();
  alerts = banner(document.getElementById("alerts"));
  introduction = poll(async () => {
    Object.assign(about, await get("about"));
    const facts = document.getElementById("facts");
    const workers = about.live_workers ? many(about.live_workers, "worker") : "no workers";
    put(facts, ` · ${workers} · PostgreSQL ${String(about.server_version ?? "").split(" ")[0]}`);
    if (about.auth === "key" && !document.getElementById("leave")) {
      document.querySelector("#top nav").append(h("button", { id: "leave", class: "link", type: "button", onclick: signOut }, "Sign out"));
    }
  }, 10, (error) => error.status !== 401);
  show();
}

document.getElementById("skip").addEventListener("click", (e) => { e.preventDefault(); main.focus(); });
addEventListener("hashchange", show);
addEventListener("popstate", show);
begin();
