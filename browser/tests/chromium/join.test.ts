/** A phone joins by opening a link: real Chromium, a real coordinator, real Python agents. */
import { afterEach, beforeEach, expect, test } from "vitest";

import { bundlePath, Coordinator, helped, joinWith, stopped, until, Workshop, writePhotos, writeSamples } from "./fleet.ts";

const TOLERANCE = 1e-5;
let workshop: Workshop;
let [first, second] = ["", ""]; // data

beforeEach(() => {
  workshop = new Workshop();
  first = writeSamples(workshop.folder, "first.npz", 40, 1);
  second = writeSamples(workshop.folder, "second.npz", 48, 2);
});

afterEach(() => workshop.close());

function job(rounds: number, algorithm: string, count = 2): string {
  return `
bundle = "${bundlePath()}"
num_rounds = ${rounds}
seed = 3
${algorithm}
[participate]
count = ${count}
min_available = ${count}
quorum = 1.0
[local]
steps = 6
batch = 8
rate = "0.02"
`;
}

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

test("rounds beside a Python agent are those of two Python agents, through a reload and a restart", async () => {
  const rounds = 4;
  const text = job(rounds, 'algorithm = "scaffold"');
  const expected = await byPython(text, rounds);
  const coordinator = await Coordinator.start(workshop, "browser");
  const id = await coordinator.job(text);
  const start = await coordinator.weights(id, 0);
  const page = await (await workshop.open()).newPage();
  const errors: string[] = [];
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  await joinWith(page, coordinator.link, second, "phone");
  expect(page.url()).not.toContain("embrace_enrol"); // not left in the address
  const agent = coordinator.agent("pi", first);
  const why = async (): Promise<string> => `${await page.innerText("main")}\n${errors.join("\n")}\n${agent.told()}\n${coordinator.process.told()}`;
  let said = "";
  const reached = async (version: number): Promise<boolean> => ((said = await why()), (await coordinator.version(id)) >= version);
  await until(() => reached(1), () => said);
  await page.reload(); // what it kept of the first round is in the storage
  await until(() => reached(2), () => said);
  await stopped(coordinator.process, "SIGKILL");
  await coordinator.serve();
  await until(() => reached(rounds), () => said);
  const found = await coordinator.weights(id, rounds);
  expect(distance(expected, start)).toBeGreaterThan(1000 * TOLERANCE);
  expect(distance(found, expected)).toBeLessThan(TOLERANCE);
  expect(errors.filter((each) => !/ERR_CONNECTION|Failed to load resource/.test(each))).toEqual([]);
});

test("pause, go on, leave and be forgotten", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(job(1000, "", 1));
  const page = await (await workshop.open()).newPage();
  await joinWith(page, coordinator.link, first, "phone");
  await until(async () => (await helped(page)) >= 1, () => coordinator.process.told());
  await page.getByRole("button", { name: "Pause" }).click();
  await page.getByRole("heading", { name: "Paused" }).waitFor();
  const done = await helped(page);
  await page.getByRole("button", { name: "Go on" }).click();
  await until(async () => (await helped(page)) > done);
  await page.getByRole("button", { name: "Forget me" }).click();
  await page.getByRole("button", { name: "Yes, forget me" }).click();
  await page.getByText("needs a join link").waitFor();
  const [device] = (await coordinator.json("/v1/devices")) as { name: string; revoked: boolean }[];
  expect(device!.revoked).toBe(true);
  expect(device!.name).not.toContain("phone");
  await page.reload();
  await page.getByText("needs a join link").waitFor(); // nothing of it is left here
});

test("bad data is refused with a reason before anything is sent", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(job(2, ""));
  const page = await (await workshop.open()).newPage();
  await page.goto(coordinator.link);
  const pick = (name: string, text: string): Promise<void> =>
    page.setInputFiles('label:has-text("A file") input', { name, mimeType: "text/csv", buffer: Buffer.from(text) });
  await page.getByText("digits: 5 layers").waitFor();
  await pick("a.csv", "1,2,3\n4,x,6\n");
  await page.getByText("line 2, column 2: expected a finite number, got 'x'").waitFor();
  await pick("a.csv", "1,2,3\n4,5,6\n");
  await page.getByText("takes 1×8×8").waitFor();
  await pick("a.npz", "no zip");
  await page.getByText("is no .npz file").waitFor();
  expect(await page.getByRole("button", { name: "Pick data first" }).isDisabled()).toBe(true);
  expect(await coordinator.json("/v1/devices")).toEqual([]);
});

test("a device that was revoked says so and stops", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(job(2, ""));
  const page = await (await workshop.open()).newPage();
  await joinWith(page, coordinator.link, first, "phone");
  await page.getByRole("heading", { name: "Waiting" }).waitFor();
  const [device] = (await coordinator.json("/v1/devices")) as { id: string }[];
  await coordinator.call(`/v1/devices/${device!.id}`, "DELETE");
  await page.getByRole("heading", { name: "does not know this device" }).waitFor({ timeout: 90_000 });
  const other = await (await workshop.open()).newPage();
  await other.goto(`${coordinator.url}/join#embrace_enrol_wrong`);
  await other.getByText("unknown, used up or expired").waitFor();
});

test("a folder of photos teaches the same as it teaches a Python agent", async () => {
  const photos = writePhotos(`${workshop.folder}/photos`);
  const text = job(1, "", 1);
  const python = await Coordinator.start(workshop, "python");
  const theirs = await python.job(text);
  const agent = python.agent("phone", photos);
  await until(async () => (await python.version(theirs)) === 1, agent.told);
  const coordinator = await Coordinator.start(workshop, "browser");
  const ours = await coordinator.job(text);
  const page = await (await workshop.open()).newPage();
  await joinWith(page, coordinator.link, photos, "phone", "A folder of photos");
  await until(async () => (await coordinator.version(ours)) === 1);
  const [found, expected] = [await coordinator.weights(ours, 1), await python.weights(theirs, 1)];
  expect(distance(expected, await coordinator.weights(ours, 0))).toBeGreaterThan(100 * TOLERANCE);
  expect(distance(found, expected)).toBeLessThan(TOLERANCE);
});

test("photos are labelled on the spot, and the camera takes more", async () => {
  const photos = writePhotos(`${workshop.folder}/photos`);
  const coordinator = await Coordinator.start(workshop, "browser");
  await coordinator.job(job(1, "", 1));
  const page = await (await workshop.open()).newPage();
  await page.goto(coordinator.link);
  await page.setInputFiles('label:has-text("Photos to label") input', [`${photos}/class 1/photo 1.png`, `${photos}/class 2/photo 2.png`]);
  await page.getByLabel("Class of photo 1.png").selectOption("1");
  await page.getByRole("button", { name: "Camera" }).click();
  await page.getByLabel("Class of the next photo").selectOption("7");
  await until(() => page.locator("video").evaluate((video: HTMLVideoElement) => video.videoWidth > 0));
  await page.getByRole("button", { name: "Take a photo" }).click();
  await page.getByLabel("Class of photo 3").waitFor();
  await page.getByRole("button", { name: "Use these photos" }).click();
  await page.getByText("2 samples of 1 × 8 × 8, 2 labels").waitFor(); // one has no label yet
});
