/** A page measures its device and sends what it found: real Chromium, a real coordinator. */
import { afterEach, beforeEach, expect, test } from "vitest";

import { bundlePath, Coordinator, helped, joinWith, until, Workshop, writeSamples } from "./fleet.ts";

let workshop: Workshop;

beforeEach(() => void (workshop = new Workshop()));
afterEach(() => workshop.close());

test("a page is measured beside the other devices of a fleet, and trains on afterwards", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  const data = writeSamples(workshop.folder, "data.npz", 40, 1);
  await coordinator.job(`bundle = "${bundlePath()}"\nnum_rounds = 100\n[participate]\ncount = 1\n[local]\nsteps = 4\nbatch = 8\n`);
  const page = await (await workshop.open()).newPage();
  await joinWith(page, coordinator.link, data, "phone");
  await until(async () => (await helped(page)) > 0);
  await page.getByRole("button", { name: "Measure this device" }).click();
  await page.getByText("measured and sent").waitFor({ timeout: 120_000 });
  const [found] = (await coordinator.json("/v1/benchmarks")) as any[];
  expect([found.name, found.benchmark.batch]).toEqual(["phone", 8]);
  expect(found.benchmark.runtime).toMatch(/^onnxruntime-web 1\./);
  expect(found.benchmark.system).toContain("Chrom");
  expect(found.benchmark.costs.map((cost: any) => cost.tiers[0])).toEqual(["strong", "moderate", "weak"]);
  for (const { seconds, memory, problem } of found.benchmark.costs) {
    expect(problem).toBe("");
    expect(Math.min(seconds.batch, memory)).toBeGreaterThan(0);
  }
  const before = await helped(page);
  await until(async () => (await helped(page)) > before);
  const admin = ["--server", coordinator.url, "--token", `@${coordinator.folder}/admin.token`];
  const compared = workshop.run("compare", "device", "compare", ...admin);
  await until(() => compared.exitCode !== null, compared.told);
  expect(compared.told()).toContain("phone, onnxruntime-web");
});
