/** What a person sees, also one with a keyboard or a screen reader; the pictures of the documentation are made here. */
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import type { Page } from "playwright-core";
import { afterEach, beforeEach, expect, test } from "vitest";

import { Coordinator, digitsJob, helped, inTheMiddle, PHONE, pick, picture, until, Workshop, writeDigits } from "./fleet.ts";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const DESKTOP = { width: 1280, height: 800 };
let workshop: Workshop;

beforeEach(() => {
  workshop = new Workshop();
});

afterEach(async () => {
  await workshop.close();
  workshop.check();
});

/** Look for what axe finds wrong (names, roles, contrast), and for what is wider than the screen: phone and desktop, light and dark. */
async function inspect(page: Page): Promise<void> {
  for (const viewport of [DESKTOP, PHONE]) {
    await page.setViewportSize(viewport);
    for (const colorScheme of ["dark", "light"] as const) {
      await page.emulateMedia({ colorScheme });
      await page.evaluate(AXE);
      const found = await page.evaluate(async () => {
        const { passes, violations } = await (globalThis as unknown as { axe: typeof import("axe-core") }).axe.run();
        const wrong = violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 150)}`));
        return { rules: passes.map(({ id }) => id), wrong };
      });
      expect(found.wrong, `${viewport.width} pixels, ${colorScheme}`).toEqual([]);
      expect(found.rules).toContain("color-contrast"); // it did look
      expect(await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)).toBeLessThanOrEqual(0);
    }
  }
}

/** Press Tab until something has the focus; returns what was passed. */
async function tabTo(page: Page, name: string): Promise<string[]> {
  const passed: string[] = [];
  for (;;) {
    await page.keyboard.press("Tab");
    const here = await page.evaluate(() => {
      const at = document.activeElement as HTMLInputElement;
      return at.ariaLabel ?? at.labels?.[0]?.innerText.trim().split("\n")[0] ?? at.textContent ?? "";
    });
    passed.push(here);
    if (here === name) return passed;
    if (passed.length > 30) throw new Error(`no way to ${name}: ${passed.join(", ")}`);
  }
}

test("every view can be read, and everything be done by keyboard", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(digitsJob({ rounds: 500, steps: 30 }));
  const page = await (await workshop.open()).newPage();
  await page.goto(`${coordinator.url}/join`);
  await page.getByText("needs a join link").waitFor();
  await inspect(page);

  await page.goto(coordinator.link);
  await page.getByText("Trains 5 of 5 layers, from conv1").waitFor(); // before joining
  await inspect(page);
  await pick(page, writeDigits(workshop.folder));
  await page.getByLabel("Name of this device").fill("Ada's phone");
  await picture(page, "join-phone.png");
  await page.getByRole("heading", { level: 1 }).focus();
  const passed = await tabTo(page, "Join");
  for (const control of ["A folder of photos", "Photos to label", "A file", "Memory", "Name of this device"]) expect(passed).toContain(control);
  await page.keyboard.press("Enter");
  await until(async () => (await helped(page)) >= 8, () => coordinator.process.told());
  expect(await page.evaluate(() => document.activeElement?.tagName)).toBe("H1"); // a screen reader begins there
  const curve = await page.getByRole("img", { name: /Loss [\d.]+ in round 1, [\d.]+ in round/ }).getAttribute("aria-label");
  const [before, after] = [...curve!.matchAll(/([\d.]+) in round/g)].map(([, loss]) => Number(loss));
  expect(after).toBeLessThan(before!);
  await page.getByRole("meter", { name: "Memory used" }).waitFor();
  await inTheMiddle(page);
  await picture(page, "join-training.png");
  await inspect(page);

  await tabTo(page, "Leave");
  await page.keyboard.press("Enter");
  await until(() => page.evaluate(() => document.activeElement?.getAttribute("role") === "alertdialog"));
  await inspect(page);
  await tabTo(page, "No");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { level: 1 }).focus();
  await tabTo(page, "Pause");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Paused" }).waitFor();
  await inspect(page);
});
