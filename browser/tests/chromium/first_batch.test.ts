/** How many bytes and seconds lie between opening the link and the first trained batch; of another model with BUNDLE and DATA. */
import { afterEach, beforeEach, expect, test } from "vitest";

import { Coordinator, digitsJob, inTheMiddle, joinWith, Workshop, writeDigits } from "./fleet.ts";

let workshop: Workshop;

beforeEach(() => {
  workshop = new Workshop();
});

afterEach(async () => {
  await workshop.close();
  workshop.check();
});

test("from the link to the first batch", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  const { BUNDLE, DATA } = process.env;
  await coordinator.job(digitsJob(BUNDLE ? { steps: 20, batch: 32, bundle: BUNDLE } : { steps: 200 }));
  const data = DATA ?? writeDigits(workshop.folder);
  const context = await workshop.open();
  let bytes = 0;
  context.on("requestfinished", (request) => {
    void request.sizes().then(({ responseBodySize, responseHeadersSize }) => (bytes += responseBodySize + responseHeadersSize));
  });
  const page = await context.newPage();
  const moments: Record<string, [number, number]> = {};
  const began = performance.now();
  const note = (what: string): unknown => (moments[what] = [(performance.now() - began) / 1000, bytes]);
  await page.goto(coordinator.link);
  await page.getByText(/Trains \d+ of \d+ layers/).waitFor();
  note("the page is there");
  await joinWith(page, coordinator.link, data, "phone");
  note("joined");
  await inTheMiddle(page);
  note("first batches");
  for (const [what, [seconds, count]] of Object.entries(moments)) console.info(`${what}: ${seconds.toFixed(1)} s, ${(count / 1e6).toFixed(2)} MB`);
  expect(bytes).toBeGreaterThan(3e6); // the runtime came
  expect(bytes).toBeLessThan(6e6);
});
