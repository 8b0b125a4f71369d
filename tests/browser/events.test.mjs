// The pure parts of fanout-events.js: `node --test tests/browser/`. The rest is tested in a browser.
import assert from "node:assert/strict";
import { test } from "node:test";
import { readFile } from "node:fs/promises";

const file = new URL("../../api/fanout_api/dashboard/fanout-events.js", import.meta.url);
const source = await readFile(file, "utf8");
const { lower, parseCursor, parseId, pauseBefore, Place, streamUrl } = await import(
  `data:text/javascript,${encodeURIComponent(source)}`
);

test("a pause doubles up to its greatest, and half of it is chance", () => {
  assert.equal(pauseBefore(1, () => 0), 500);
  assert.equal(pauseBefore(1, () => 1), 1000);
  assert.equal(pauseBefore(3, () => 1), 4000);
  assert.equal(pauseBefore(99, () => 1), 20000);
});

test("an id is one cursor, or one for each stream; garbage is none", () => {
  assert.deepEqual(parseCursor("2.17"), { generation: 2, number: 17 });
  for (const bad of [null, undefined, "", "1", "1.x", "-1.2", "1.2.3", "newest"]) assert.equal(parseCursor(bad), null);
  assert.deepEqual([...parseId("1.5", 12)], [[12, { generation: 1, number: 5 }]]);
  assert.deepEqual([...parseId("12:1.340_13:2.1")].map(([job, c]) => [job, c.number]), [[12, 340], [13, 1]]);
  assert.equal(parseId("nonsense_x:y_").size, 0);
});

test("one job has its own address, several share one", () => {
  assert.equal(streamUrl("http://h/x/", [[7, null]]), "http://h/x/v1/jobs/7/events");
  assert.equal(streamUrl("http://h/x/", [[7, "1.5"]]), "http://h/x/v1/jobs/7/events?after=1.5");
  assert.equal(streamUrl("http://h/x/", [[7, "1.5"], [8, null]]), "http://h/x/v1/streams?s=7:1.5&s=8");
});

test("an event is taken once, whatever comes again", () => {
  const place = new Place();
  place.hello({ generation: 1, last: 3, after: 0 });
  assert.equal(place.behind, 3);
  const seen = [1, 2, 2, 1, 3, 3].filter((number) => place.take({ generation: 1, number }));
  assert.deepEqual(seen, [1, 2, 3]);
  assert.equal(place.cursor, "1.3");
  assert.equal(place.behind, 0);
});

test("a stream that begins above what was seen is a gap, and one below is none", () => {
  const place = new Place("1.10");
  assert.equal(place.hello({ generation: 1, last: 40, after: 4 }), false);
  assert.equal(place.cursor, "1.10");
  assert.equal(place.hello({ generation: 1, last: 40, after: 30 }), true);
});

test("a reset moves the place, unless what it skips was seen", () => {
  const place = new Place("1.10");
  assert.equal(place.reset("1.5"), false);
  assert.equal(place.reset("1.51"), true);
  assert.equal(place.cursor, "1.50");
  assert.equal(place.reset("2.1"), true);
  assert.ok(place.take({ generation: 2, number: 1 }));
  assert.ok(!place.take({ generation: 1, number: 99 }));
});

test("the lower of two places is where nobody lacks anything", () => {
  assert.equal(lower("1.5", "1.50"), "1.5");
  assert.equal(lower("2.1", "1.50"), "1.50");
  assert.equal(lower("newest", "1.5"), "1.5");
  assert.equal(lower("newest", "newest"), "newest");
  assert.equal(lower(null, "1.5"), null);
});

test("who wants only progress asks for no event, also when it comes back", () => {
  const url = (starts) => streamUrl("http://h/", starts);
  assert.equal(url([[7, "progress"]]), "http://h/v1/streams?s=7:progress");
  assert.equal(url([[7, "progress"], [8, "1.5"]]), "http://h/v1/streams?s=7:progress&s=8:1.5");
  const place = new Place("progress");
  assert.equal(place.hello({ generation: 1, last: 40, after: 40 }), false);
  assert.equal(place.hello({ generation: 2, last: 9, after: 9 }), false);
  assert.equal(place.cursor, "progress");
  assert.equal(place.behind, 0);
  for (const other of ["1.5", "newest", null]) {
    assert.equal(lower("progress", other), other);
    assert.equal(lower(other, "progress"), other);
  }
});
