/** A device pauses by itself as its person chose: hidden page, low battery, metered connection; the screen stays on. */
import type { Page } from "playwright-core";
import { afterEach, beforeEach, expect, test } from "vitest";

import { Coordinator, digitsJob, helped, pick, until, Workshop, writeSamples } from "./fleet.ts";

/** What stands in for the phone around the page: a browser without a screen has none of it. */
interface Surroundings {
  readonly battery: EventTarget & { level: number; charging: boolean };
  readonly connection: EventTarget & { type: string; saveData: boolean };
  visible: boolean;
  awake: number; // locks that are held
}
declare const surroundings: Surroundings;

function install(): void {
  const made: Surroundings = {
    battery: Object.assign(new EventTarget(), { level: 0.9, charging: false }),
    connection: Object.assign(new EventTarget(), { type: "wifi", saveData: false }),
    visible: true,
    awake: 0,
  };
  const request = async (): Promise<unknown> => {
    made.awake++;
    return { release: async () => void made.awake-- };
  };
  Object.assign(globalThis, { surroundings: made });
  Object.defineProperty(navigator, "getBattery", { value: async () => made.battery });
  Object.defineProperty(navigator, "connection", { value: made.connection });
  Object.defineProperty(navigator, "wakeLock", { value: { request } });
  Object.defineProperty(document, "visibilityState", { get: () => (made.visible ? "visible" : "hidden") });
}

const setBattery = (page: Page, level: number, charging: boolean): Promise<void> =>
  page.evaluate(([level, charging]) => {
    Object.assign(surroundings.battery, { level, charging }).dispatchEvent(new Event("levelchange"));
  }, [level, charging] as const);

const setConnection = (page: Page, type: string, saveData = false): Promise<void> =>
  page.evaluate(([type, saveData]) => {
    Object.assign(surroundings.connection, { type, saveData }).dispatchEvent(new Event("change"));
  }, [type, saveData] as const);

const setVisible = (page: Page, visible: boolean): Promise<void> =>
  page.evaluate((visible) => {
    surroundings.visible = visible;
    document.dispatchEvent(new Event("visibilitychange"));
  }, visible);

let workshop: Workshop;

beforeEach(() => {
  workshop = new Workshop();
});

afterEach(async () => {
  await workshop.close();
  workshop.check();
});

async function goesOn(page: Page): Promise<void> {
  const done = await helped(page);
  await until(async () => (await helped(page)) > done + 1);
}

async function pauses(page: Page, why: string): Promise<void> {
  await page.getByRole("heading", { name: "Paused" }).waitFor();
  await page.getByText(why).waitFor();
  expect(await page.evaluate(() => surroundings.awake)).toBe(0);
}

test("it pauses for what the person chose, for nothing else, and goes on afterwards", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(digitsJob());
  const context = await workshop.open();
  await context.addInitScript(install);
  const page = await context.newPage();
  await page.goto(coordinator.link);
  await pick(page, writeSamples(workshop.folder, "a.npz", 40, 1));
  await page.getByText("below 30 % (now 90 %)").waitFor();
  await page.getByLabel("Pause when this page is not visible").check();
  await page.getByLabel("Pause on mobile data").uncheck();
  await page.getByRole("button", { name: "Join" }).click();
  await goesOn(page);
  expect(await page.evaluate(() => surroundings.awake)).toBe(1); // the screen stays on

  await setVisible(page, false);
  await pauses(page, "the page is not visible");
  await setVisible(page, true);
  await goesOn(page);
  await setVisible(page, false); // and visible again before it has stopped
  await setVisible(page, true);
  await goesOn(page);

  await setBattery(page, 0.2, false);
  await pauses(page, "the battery is low");
  await page.getByText("20 %: plug it in if you can").waitFor();
  await setBattery(page, 0.2, true);
  await goesOn(page);

  await setConnection(page, "cellular", true); // not chosen
  await goesOn(page);

  await page.getByRole("button", { name: "Leave" }).click();
  await page.getByRole("button", { name: "Yes, leave" }).click();
  await page.goto(coordinator.link);
  await page.getByText("a.npz: 40 samples").waitFor();
  await page.getByRole("button", { name: "Join" }).click(); // now with what is chosen by default
  await pauses(page, "the connection is metered");
  await setConnection(page, "wifi");
  await goesOn(page);
  await setConnection(page, "wifi", true);
  await pauses(page, "the connection is metered");
  await setConnection(page, "wifi");
  await setVisible(page, false); // not chosen this time
  await goesOn(page);
});
