/** What can be done to a job. Each verb says what will happen, or why it cannot be done. */

import { may, mayNot, post } from "./api.js";
import { asking, fill, h, isEnded, many, put, said } from "./dom.js";

/**
 * The verbs of one job. `done` is called after each that changed something, `reopened` after a retry.
 */
export function verbsOf(first, { done, reopened }) {
  const { id } = first;
  const isChild = first.parent_id !== null;
  const element = h("div", { class: "actions" });
  let [job, notify] = [first, false];

  /** A button that asks; or one that cannot be used, and why. */
  const verb = (label, why, question, act, options) => (why
    ? h("button", { type: "button", disabled: true, title: why, "aria-description": why }, label)
    : asking(label, question, async () => { const answer = await act(); done(); return answer; }, { ...options, rested: () => show(job) }));

  async function retry(body) {
    const { retried } = await post(`jobs/${isChild && !job.total ? first.parent_id : id}/retry`, body);
    reopened();
    return retried ? `${many(retried, "job")} will run again` : "nothing was left to retry";
  }

  const cancels = () => {
    const open = job.total - job.completed - job.failed - job.cancelled;
    return job.total ? `Cancels ${many(open, "child", "children")} that ${open === 1 ? "has" : "have"} not ended. What has ended stays.`
      : "Cancels this job. If it runs, it is told to stop.";
  };

  function show(next) {
    job = next;
    const ended = isEnded(job.status);
    const why = mayNot("operate") || (ended ? "It has ended." : job.verdict ? "It is being ended." : "");
    fill(element, JSON.stringify([job.status, job.failed > 0, job.paused, job.verdict, why]),
      !may("operate") && h("small", { class: "quiet" }, mayNot("operate")),
      !isChild && (job.paused
        ? verb("Resume", why, "Its children start again.", async () => ((await post(`jobs/${id}/resume`)).resumed ? "it goes on" : "it was not paused"))
        : verb("Pause", why, "Nothing more of it starts until it is resumed. What runs goes on to its end.", async () => ((await post(`jobs/${id}/pause`)).paused ? "it is paused" : "it was paused already"))),
      verb("Cancel", why, cancels, async () => ((await post(`jobs/${id}/cancel`)).cancelled ? "it is being cancelled" : "it had ended already"), { yes: "Cancel it" }),
      job.failed > 0 && verb("Retry failed", mayNot("operate") || (job.verdict || ["failed", "cancelled"].includes(job.status) ? "It was ended as a whole: what failed in it is not run again." : ""), () => `Runs ${many(job.failed, "failed child", "failed children")} again${isEnded(job.status) ? " and opens this batch again" : ""}.`, () => retry({}), { yes: "Retry" }),
      !job.total && job.status === "failed" && verb("Retry", mayNot("operate"), "Runs this job again.", () => retry(isChild ? { keys: [first.document_key] } : {})),
      !ended && !isChild && "Notification" in globalThis && bell());
  }

  function bell() {
    return h("button", { type: "button", "aria-pressed": String(notify), title: "A notification, if your browser allows it", onclick: async ({ currentTarget: button }) => {
      notify = !notify && (await Notification.requestPermission()) === "granted";
      button.setAttribute("aria-pressed", String(notify));
      if (Notification.permission === "denied") put(button, "Notifications are blocked by the browser");
    } }, "Tell me when it ends");
  }

  return { element, show, verb, retry, ended: (title, body) => notify && new Notification(title, { body }) };
}

/** Priority and concurrency of a batch that is open, and documents added to it. */
export function settingsOf({ id }, done) {
  const answer = h("span", { class: "quiet", role: "status" });
  const priority = h("select", { id: "priority", onchange: () => set("priority", { priority: Number(priority.value) }) },
    Array.from({ length: 10 }, (_, n) => h("option", { value: n }, { 0: "0, first", 5: "5, as usual", 9: "9, last" }[n] ?? n)));
  const most = h("input", { id: "most", type: "number", min: 1, max: 2147483647, placeholder: "as many as may" });
  const form = h("form", { class: "filters", onsubmit: (e) => {
    e.preventDefault();
    set("concurrency", { concurrency: most.value === "" ? null : Number(most.value) });
  } }, h("label", { for: "priority" }, "Priority"), priority, h("label", { for: "most" }, "Children at once"), most, h("button", {}, "Set"), answer);

  async function set(what, body) {
    try {
      await post(`jobs/${id}/${what}`, body);
      answer.replaceChildren("set");
      done();
    } catch (error) {
      answer.replaceChildren(said(error.message, "span", { class: "bad" }));
    }
    setTimeout(() => answer.replaceChildren(), 8000);
  }

  const kind = h("input", { id: "add-kind", required: true, size: 20, placeholder: "papers_extract" });
  const documents = h("textarea", { id: "add-documents", required: true, rows: 3, cols: 40, placeholder: '{"key": "paper-7", "payload": {"id": 7}}' });
  const more = h("form", { class: "filters", onsubmit: add }, h("label", { for: "add-kind" }, "Kind"), kind,
    h("label", { for: "add-documents" }, "Documents, a line of JSON each"), documents, h("button", {}, "Add"));

  /** Documents for the batch; what cannot be read is named by its line, and nothing is sent. */
  async function add(e) {
    e.preventDefault();
    try {
      const lines = documents.value.split("\n").map((text, n) => ({ text: text.trim(), n: n + 1 })).filter(({ text }) => text);
      const read = lines.map(({ text, n }) => {
        try { return JSON.parse(text); } catch (error) { throw new Error(`Line ${n} is not JSON: ${error.message}`); }
      });
      const { created, known } = await post(`jobs/${id}/children`, { kind: kind.value, documents: read });
      answer.replaceChildren(`${many(created, "document")} added${known ? `, ${known} had a child already` : ""}`);
      documents.value = "";
      done();
    } catch (error) {
      answer.replaceChildren(said(error.message, "span", { class: "bad" }));
    }
  }

  const element = h("section", {}, h("h2", {}, "Settings"), form, h("details", {}, h("summary", {}, "Add documents"), more));
  return {
    element,
    show(job) {
      element.hidden = isEnded(job.status) || Boolean(job.verdict);
      for (const one of [...form.elements, ...more.elements]) {
        one.title = mayNot("operate");
        one.disabled = !may("operate");
      }
      if (document.activeElement !== priority) priority.value = job.priority;
      if (document.activeElement !== most) most.value = job.concurrency ?? "";
    },
  };
}
