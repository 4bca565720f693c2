/** Threads and WebGPU in real Chromium, on the page that a person opens: the same round as a Python agent's. */
import type { Page } from "playwright-core";
import { afterEach, beforeEach, expect, test } from "vitest";

import { bundlePath, Coordinator, joinWith, stopped, until, Workshop, writeSamples } from "./fleet.ts";

const TOLERANCE = 1e-5;
const GPU = ["--no-sandbox", "--enable-unsafe-webgpu"]; // which gives a headless Chromium an adapter made of software
let workshop: Workshop;
let data = "";

beforeEach(() => {
  workshop = new Workshop();
  data = writeSamples(workshop.folder, "data.npz", 40, 1);
});

afterEach(() => workshop.close());

const JOB = `
bundle = "${bundlePath()}"
num_rounds = 1
seed = 3
[participate]
count = 1
min_available = 1
[local]
steps = 6
batch = 8
rate = "0.02"
`;

/** Train one round with a Python agent, and one with a page; returns how far apart they end and what the page is as a device. */
async function roundOnBoth(page: Page): Promise<{ apart: number; moved: number; device: { profile: { threads: number; runtime: string } } }> {
  const python = await Coordinator.start(workshop, "python");
  const theirs = await python.job(JOB);
  const agent = python.agent("phone", data);
  await until(async () => (await python.version(theirs)) === 1, agent.told);
  const expected = await python.weights(theirs, 1);
  for (const child of [agent, python.process]) await stopped(child);
  const coordinator = await Coordinator.start(workshop, "browser");
  const ours = await coordinator.job(JOB);
  const start = await coordinator.weights(ours, 0);
  await joinWith(page, coordinator.link, data, "phone");
  let shown = "";
  await until(async () => ((shown = await page.innerText("main")), (await coordinator.version(ours)) === 1), () => shown);
  const found = await coordinator.weights(ours, 1);
  const distance = (a: Float32Array, b: Float32Array): number => a.reduce((most, value, at) => Math.max(most, Math.abs(value - b[at]!)), 0);
  const [device] = await coordinator.json("/v1/devices");
  return { apart: distance(found, expected), moved: distance(start, expected), device };
}

test("an isolated page trains with threads, and the round is the same", async () => {
  const page = await (await workshop.open()).newPage();
  await page.addInitScript(() => Object.defineProperty(navigator, "hardwareConcurrency", { get: () => 8 })); // of which half are used
  const workers: string[] = [];
  page.on("worker", (worker) => workers.push(worker.url()));
  const { apart, moved, device } = await roundOnBoth(page);
  expect(await page.evaluate(() => globalThis.crossOriginIsolated)).toBe(true);
  expect(device.profile.threads).toBe(4);
  expect(workers.some((url) => url.includes("ort-wasm-simd-threaded"))).toBe(true);
  expect(moved).toBeGreaterThan(100 * TOLERANCE);
  expect(apart).toBeLessThan(TOLERANCE);
});

test("with an adapter WebGPU is tried, the page says what came of it, and the round is the same", async () => {
  const page = await (await workshop.open(GPU)).newPage();
  const loaded: string[] = [];
  page.on("request", (request) => loaded.push(request.url()));
  const { apart, moved, device } = await roundOnBoth(page);
  const adapter = await page.evaluate(async () => Boolean(await (navigator as { gpu?: { requestAdapter(): unknown } }).gpu?.requestAdapter()));
  expect(adapter, "this Chromium has no adapter, not even of software").toBe(true);
  expect(device.profile.runtime).toContain("webgpu");
  expect(loaded.some((url) => /simd-threaded\.jspi.*wasm/.test(url))).toBe(true);
  expect(loaded.some((url) => /simd-threaded-[^.]*\.wasm/.test(url))).toBe(false); // one runtime, not two
  await page.getByText(/WebGPU (trains: it )?takes \d+ ms a step/).waitFor();
  expect(moved).toBeGreaterThan(100 * TOLERANCE);
  expect(apart).toBeLessThan(TOLERANCE);
});
