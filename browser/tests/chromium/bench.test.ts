/** `embrace bench browser` as a person runs it: a real Chromium, every column that it has, the same losses as native. */
import { fileURLToPath } from "node:url";

import { afterEach, beforeEach, expect, test } from "vitest";

import { CHROMIUM, until, Workshop } from "./fleet.ts";

const DEPTHWISE = fileURLToPath(new URL("../../../tests/golden/files/depthwise", import.meta.url)); // whose batch norm WebGPU does not take as it is
let workshop: Workshop;

beforeEach(() => void (workshop = new Workshop()));
afterEach(() => workshop.close());

test("every column is timed, WebGPU too, and trains what native trains", async () => {
  const options = ["--boundaries", "stem", "--rounds", "2", "--batch", "8", "--software-gpu", "--chromium", CHROMIUM, "--json"];
  const child = workshop.run("bench", "bench", "browser", DEPTHWISE, ...options);
  await until(() => child.exitCode !== null, child.told);
  expect(child.exitCode, child.told()).toBe(0);
  const text = child.told();
  const found = JSON.parse(text.slice(text.indexOf("{"), text.lastIndexOf("}") + 1));
  expect(found.columns).toEqual(["native, 1 thread", "native, 2 threads", "wasm, 1 thread", "wasm, 2 threads", "WebGPU"]);
  expect(found.notes).toEqual([expect.stringContaining("WebGPU's adapter")]); // none that a loss was another
  const [timing] = found.timings;
  for (const column of found.columns) expect(timing.steps[column].length).toBe(10);
  expect(found.first[0].bytes).toBeGreaterThan(3e6);
  expect(found.first[0].bytes).toBeLessThan(5e6); // one runtime, not two
});
