/** A phone joins by opening a link: real Chromium, a real coordinator, real Python agents. */
import { afterEach, beforeEach, expect, test } from "vitest";

import { Coordinator, digitsJob, helped, inTheMiddle, joinWith, pick, stopped, until, Workshop, writePhotos, writeSamples, writeTable } from "./fleet.ts";

const TOLERANCE = 1e-5;
let workshop: Workshop;
let [first, second] = ["", ""]; // data

beforeEach(() => {
  workshop = new Workshop();
  first = writeSamples(workshop.folder, "first.npz", 40, 1);
  second = writeSamples(workshop.folder, "second.npz", 48, 2);
});

afterEach(async () => {
  await workshop.close();
  workshop.check();
});

/** The weights that two Python agents arrive at. */
async function byPython(text: string, rounds: number): Promise<Float32Array> {
  const coordinator = await Coordinator.start(workshop, "python");
  const id = await coordinator.job(text);
  const agents = [coordinator.agent("pi", first), coordinator.agent("phone", second)];
  await until(async () => (await coordinator.version(id)) === rounds, () => agents.map((agent) => agent.told()).join("\n"));
  const weights = await coordinator.weights(id, rounds);
  for (const child of [...agents, coordinator.process]) await stopped(child);
  return weights;
}

function distance(a: Float32Array, b: Float32Array): number {
  expect(a.length).toBe(b.length);
  return a.reduce((most, value, at) => Math.max(most, Math.abs(value - b[at]!)), 0);
}

test("rounds beside a Python agent are those of two Python agents, through a reload and a kill in the middle", async () => {
  const rounds = 4;
  const text = digitsJob({ rounds, count: 2, steps: 40, more: 'algorithm = "scaffold"' });
  const expected = await byPython(text, rounds);
  const coordinator = await Coordinator.start(workshop, "browser");
  const id = await coordinator.job(text);
  const start = await coordinator.weights(id, 0);
  const page = await (await workshop.open()).newPage();
  await joinWith(page, coordinator.link, second, "phone");
  expect(page.url()).not.toContain("embrace_enrol"); // not left in the address
  const agent = coordinator.agent("pi", first);
  const why = async (): Promise<string> => [await page.innerText("main"), ...workshop.problems, agent.told(), coordinator.process.told()].join("\n");
  let said = "";
  const reached = async (version: number): Promise<boolean> => ((said = await why()), (await coordinator.version(id)) >= version);
  await until(() => reached(1), () => said);
  await inTheMiddle(page);
  await page.reload(); // what it kept of the first round is in the storage
  await until(() => reached(2), () => said);
  await inTheMiddle(page);
  await stopped(coordinator.process, "SIGKILL");
  await coordinator.serve();
  await until(() => reached(rounds), () => said);
  const found = await coordinator.weights(id, rounds);
  expect(distance(expected, start)).toBeGreaterThan(1000 * TOLERANCE);
  expect(distance(found, expected)).toBeLessThan(TOLERANCE);
  await until(async () => (await helped(page)) === rounds); // also those before the reload
  expect(workshop.requests.some((url) => url.includes("/v1/tasks/next"))).toBe(true); // the worker's are seen, too
});

test("pause, go on, leave, join again and be forgotten", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(digitsJob());
  const page = await (await workshop.open()).newPage();
  await joinWith(page, coordinator.link, first, "phone");
  await until(async () => (await helped(page)) >= 1, () => coordinator.process.told());
  await page.getByRole("button", { name: "Pause" }).click();
  await page.getByRole("heading", { name: "Paused" }).waitFor();
  const done = await helped(page);
  await page.reload();
  await page.getByRole("heading", { name: "Paused" }).waitFor(); // it stays so
  await page.getByRole("button", { name: "Go on" }).click();
  await until(async () => (await helped(page)) > done);
  await page.getByRole("button", { name: "Leave" }).click();
  await page.getByRole("button", { name: "Yes, leave" }).click();
  await page.getByText("needs a join link").waitFor();
  const devices = async (): Promise<{ name: string; revoked: boolean }[]> => coordinator.json("/v1/devices");
  expect((await devices()).map(({ revoked }) => revoked)).toEqual([true]);
  await page.goto(coordinator.link); // which differs in its fragment only: no page is loaded
  await page.getByText("first.npz: 40 samples").waitFor(); // the data stayed
  await page.getByRole("button", { name: "Join" }).click();
  await until(async () => (await helped(page)) >= 1);
  await page.getByRole("button", { name: "Forget me" }).click();
  await page.getByRole("button", { name: "Yes, forget me" }).click();
  await page.getByText("needs a join link").waitFor();
  const known = await devices();
  expect(known.map(({ revoked }) => revoked)).toEqual([true, true]);
  expect(known.some(({ name }) => name.includes("phone"))).toBe(false);
  await page.reload();
  await page.getByText("needs a join link").waitFor(); // nothing of it is left here
  expect(await page.evaluate(leftHere)).toEqual([]);
});

/** What is left in this browser: tables with something in them, files. */
async function leftHere(): Promise<string[]> {
  const found: string[] = [];
  for (const { name } of await indexedDB.databases()) {
    const opening = indexedDB.open(name!);
    await new Promise((resolve) => (opening.onsuccess = resolve));
    for (const table of opening.result.objectStoreNames) {
      const counting = opening.result.transaction(table).objectStore(table).count();
      await new Promise((resolve) => (counting.onsuccess = resolve));
      if (counting.result > 0) found.push(table);
    }
    opening.result.close();
  }
  const files = (await navigator.storage.getDirectory()) as unknown as { keys(): AsyncIterable<string> };
  for await (const name of files.keys()) found.push(name);
  return [...found, ...Object.keys(localStorage), ...Object.keys(sessionStorage)];
}

test("bad data is refused with a reason before anything is sent", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(digitsJob());
  const page = await (await workshop.open()).newPage();
  await page.goto(coordinator.link);
  const give = (name: string, text: string): Promise<void> =>
    page.setInputFiles('label:has-text("A file") input', { name, mimeType: "text/csv", buffer: Buffer.from(text) });
  await page.getByText("digits: 5 layers").waitFor();
  for (const [name, text, reason] of [
    ["a.csv", "1,2,3\n4,x,6\n", "line 2, column 2: expected a finite number, got 'x'"],
    ["a.csv", "1,2,3\n4,5,6\n", "takes 1×8×8"],
    ["a.csv", "", "has no samples"],
    ["a.npz", "no zip", "is no .npz file"],
  ] as const) {
    await give(name, text);
    const alert = page.getByRole("alert").filter({ hasText: reason });
    await alert.waitFor();
    expect(await alert.innerText()).not.toContain("\n");
  }
  await page.setInputFiles('label:has-text("Photos to label") input', { name: "no.png", mimeType: "image/png", buffer: Buffer.from("no picture") });
  await page.getByLabel("Class of no.png").selectOption("1");
  await page.getByRole("button", { name: "Use these photos" }).click();
  await page.getByRole("alert").filter({ hasText: "no.png" }).waitFor();
  expect(await page.getByRole("button", { name: "Pick data first" }).isDisabled()).toBe(true);
  expect(await coordinator.json("/v1/devices")).toEqual([]);
});

test("a device that was revoked says so, stops, and joins again with a new link", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(digitsJob({ count: 2 }));
  const page = await (await workshop.open()).newPage();
  await joinWith(page, coordinator.link, first, "phone");
  await page.getByRole("heading", { name: "Waiting" }).waitFor();
  const [device] = (await coordinator.json("/v1/devices")) as { id: string }[];
  await coordinator.call(`/v1/devices/${device!.id}`, "DELETE");
  await page.getByRole("heading", { name: "does not know this device" }).waitFor({ timeout: 90_000 });
  await page.getByText("Ask the person who runs the training for a new link").waitFor();
  await page.goto(coordinator.link);
  await page.getByRole("button", { name: "Join again" }).click();
  await page.getByText("first.npz: 40 samples").waitFor();
  const other = await (await workshop.open()).newPage();
  await other.goto(`${coordinator.url}/join#embrace_enrol_wrong`);
  await other.getByText("unknown, used up or expired").waitFor();
});

test.each([
  ["a folder of photos", "A folder of photos", (folder: string) => writePhotos(`${folder}/photos`)],
  ["a table", "A file", writeTable],
])("%s teaches the same as it teaches a Python agent", async (_, picker, write) => {
  const data = write(workshop.folder);
  const text = digitsJob({ rounds: 1 });
  const python = await Coordinator.start(workshop, "python");
  const theirs = await python.job(text);
  const agent = python.agent("phone", data);
  await until(async () => (await python.version(theirs)) === 1, agent.told);
  const coordinator = await Coordinator.start(workshop, "browser");
  const ours = await coordinator.job(text);
  const page = await (await workshop.open()).newPage();
  await joinWith(page, coordinator.link, data, "phone", picker);
  await until(async () => (await coordinator.version(ours)) === 1);
  const [found, expected] = [await coordinator.weights(ours, 1), await python.weights(theirs, 1)];
  expect(distance(expected, await coordinator.weights(ours, 0))).toBeGreaterThan(100 * TOLERANCE);
  expect(distance(found, expected)).toBeLessThan(TOLERANCE);
});

test("photos are labelled on the spot, the camera takes more, and they teach", async () => {
  const photos = writePhotos(`${workshop.folder}/photos`);
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(digitsJob());
  const page = await (await workshop.open()).newPage();
  await page.goto(coordinator.link);
  await page.setInputFiles('label:has-text("Photos to label") input', [`${photos}/class 1/photo 1.png`, `${photos}/class 2/photo 2.png`]);
  await page.getByLabel("Class of photo 1.png").selectOption("1");
  await page.getByRole("button", { name: "Camera" }).click();
  await page.getByLabel("Class of the next photo").selectOption("7");
  await until(() => page.locator("video").evaluate((video: HTMLVideoElement) => video.videoWidth > 0));
  await page.getByRole("button", { name: "Take a photo" }).click();
  await page.getByLabel("Class of photo 3").waitFor();
  await page.getByText("2 of 3 photos have a class").waitFor();
  await page.getByRole("button", { name: "Use these photos" }).click();
  await page.getByText("2 samples of 1 × 8 × 8, 2 labels").waitFor();
  await page.getByRole("button", { name: "Close the camera" }).click();
  await page.getByRole("button", { name: "Join" }).click();
  await until(async () => (await helped(page)) >= 1, () => coordinator.process.told());
});

test("one tab is the device; when it is closed, the other goes on", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(digitsJob());
  const context = await workshop.open();
  const page = await context.newPage();
  await joinWith(page, coordinator.link, first, "phone");
  await until(async () => (await helped(page)) >= 1);
  const other = await context.newPage();
  await other.goto(`${coordinator.url}/join`);
  await other.getByRole("heading", { name: "Another tab" }).waitFor();
  await page.close();
  await other.getByRole("button", { name: "Pause" }).waitFor();
  const done = await helped(other);
  await until(async () => (await helped(other)) > done);
});

test("what was picked is kept when the page is reloaded before joining", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(digitsJob());
  const page = await (await workshop.open()).newPage();
  await page.goto(coordinator.link);
  await pick(page, first);
  await page.reload();
  await page.getByText("first.npz: 40 samples").waitFor();
  expect(await page.getByRole("button", { name: "Join" }).isEnabled()).toBe(true); // the link is remembered, too
});
