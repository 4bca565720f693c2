/** The dashboard in real Chromium, beside a real coordinator and real agents. It also takes the pictures of the documentation. */
import { execFileSync } from "node:child_process";
import { existsSync, readdirSync, readFileSync, rmSync, statSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

import { unzipSync } from "fflate";
import jsQR from "jsqr";
import type { BrowserContextOptions, Page } from "playwright-core";
import { afterEach, beforeEach, expect, test, vi } from "vitest";

import { printable } from "../../src/federation/printable.ts";
import { bundlePath, Coordinator, picture, PYTHON, ROOT, stopped, until, Workshop } from "./fleet.ts";

const DESKTOP: BrowserContextOptions = { viewport: { width: 1280, height: 960 }, acceptDownloads: true };
const PHONE: BrowserContextOptions = { viewport: { width: 390, height: 844 }, deviceScaleFactor: 2 };
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const PATIENCE = 240_000; // milliseconds until something that should happen is given up
let workshop: Workshop;

vi.setConfig({ testTimeout: 4 * PATIENCE }); // a limit, on a machine that does other things

beforeEach(() => {
  workshop = new Workshop();
});
afterEach(() => workshop.close());

/** A page that must stay quiet: nothing thrown, no policy broken, no request elsewhere. */
class Watched {
  readonly complaints: string[] = [];

  private constructor(
    readonly page: Page,
    readonly coordinator: Coordinator,
  ) {}

  static async open(coordinator: Coordinator, options: BrowserContextOptions = DESKTOP): Promise<Watched> {
    const page = await (await workshop.open(undefined, options)).newPage();
    page.setDefaultTimeout(PATIENCE);
    const made = new Watched(page, coordinator);
    page.on("console", (message) => message.type() === "error" && !/status of 40[014] /.test(message.text()) && made.complaints.push(message.text()));
    page.on("pageerror", (error) => made.complaints.push(String(error)));
    page.on("dialog", (dialog) => (made.complaints.push(`dialog: ${dialog.message()}`), void dialog.dismiss()));
    page.on("request", (request) => !/^(data|blob):/.test(request.url()) && !request.url().startsWith(coordinator.url) && made.complaints.push(request.url()));
    await page.goto(coordinator.url);
    return made;
  }

  async signIn(): Promise<void> {
    await this.page.getByLabel("Administrator’s token").fill(this.coordinator.admin);
    await this.page.getByRole("button", { name: "Sign in" }).click();
    await this.page.getByText("live", { exact: true }).waitFor();
  }

  async go(hash: string): Promise<void> {
    await this.page.evaluate((to) => (location.hash = to), hash);
    await this.page.locator(".loading").first().waitFor({ state: "detached" });
  }

  /** Ask axe for what a screen reader, a keyboard or weak eyes would stumble over; and nothing may stick out to the side. */
  async check(): Promise<void> {
    await this.page.evaluate(AXE);
    const found = await this.page.evaluate(async () => {
      const { violations } = await (globalThis as unknown as { axe: { run: () => Promise<{ violations: { id: string; nodes: { html: string; failureSummary: string }[] }[] }> } }).axe.run();
      return violations.map((each) => `${each.id}: ${each.nodes.map((node) => `${node.html.slice(0, 160)} ${node.failureSummary}`).slice(0, 3).join(" | ")}`);
    });
    expect(found).toEqual([]);
    const [inside, window] = await this.page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
    expect(inside).toBeLessThanOrEqual(window!);
  }

  async picture(name: string): Promise<void> {
    await this.page.evaluate(() => document.fonts.ready);
    await picture(this.page, `${name}.png`, false, 256);
  }

  quiet(): void {
    expect(this.complaints).toEqual([]);
  }
}

/** Handwritten digits, a part for each device. */
function writeDigits(parts: number): string[] {
  const program = `
import sys, numpy as np
from sklearn.datasets import load_digits
digits = load_digits()
order = np.random.default_rng(1).permutation(len(digits.target))
for number, part in enumerate(np.array_split(order, int(sys.argv[2]))):
    np.savez(f"{sys.argv[1]}/digits{number}.npz", x=(digits.images[part, None] * 15).astype(np.uint8), y=digits.target[part])
`;
  execFileSync(PYTHON, ["-c", program, workshop.folder, String(parts)]);
  return Array.from({ length: parts }, (_, number) => join(workshop.folder, `digits${number}.npz`));
}

const JOB = (rounds: number, more = ""): string => `
bundle = "${bundlePath()}"
name = "Handwritten digits"
num_rounds = ${rounds}
algorithm = "embracing"
${more}
[evaluate]
on_devices = true
`;

test("the whole page is small", () => {
  const folder = join(ROOT, "coordinator/web/assets");
  const page = readFileSync(join(ROOT, "coordinator/web/index.html"), "utf8");
  const size = (name: string): number => {
    const path = join(folder, name);
    return existsSync(`${path}.gz`) ? statSync(`${path}.gz`).size : gzipSync(readFileSync(path)).length;
  };
  const own = [...page.matchAll(/\/web\/assets\/([\w.-]+)/g)].map((found) => found[1]!);
  expect(own.length).toBeGreaterThan(2);
  expect(own.reduce((sum, name) => sum + size(name), 0)).toBeLessThan(100_000);
  const all = readdirSync(folder).map((name) => name.replace(/\.gz$/, ""));
  expect(all.filter((name) => !name.startsWith("ort")).reduce((sum, name) => sum + size(name), 0)).toBeLessThan(200_000);
});

test("text from outside is rendered as the Python does", () => {
  const program = `
import json, sys, unicodedata
from federation.printable import printable
texts = [chr(code) for code in range(0x30000) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
texts += ["out of memory\\n\\x1b[2J\\u202e!", "x" * 501, "\\n" * 400, "\U0001fad6" * 600, ""]
json.dump([[text, printable(text), printable(text, 8)] for text in texts], sys.stdout)
`;
  const told = JSON.parse(execFileSync(PYTHON, ["-c", program], { cwd: ROOT, maxBuffer: 1 << 28 }).toString()) as [string, string, string][];
  expect(told.length).toBeGreaterThan(100_000);
  expect(told.filter(([text, whole, short]) => printable(text) !== whole || printable(text, 8) !== short).slice(0, 5)).toEqual([]);
});

test("sign in with a wrong and the right token, find nothing yet, sign out", async () => {
  const coordinator = await Coordinator.start(workshop, "served");
  const watched = await Watched.open(coordinator);
  const { page } = watched;
  await watched.check();
  await page.getByLabel("Administrator’s token").fill("embrace_admin_wrong");
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByText("This is not the administrator’s token.").waitFor();
  await page.getByLabel("Administrator’s token").fill(coordinator.enrolment);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByText("This is not the administrator’s token.").waitFor();
  expect(await page.context().cookies()).toEqual([]);
  await watched.signIn();
  const [cookie] = await page.context().cookies();
  expect(cookie).toMatchObject({ httpOnly: true, sameSite: "Strict", path: "/v1" });
  expect(await page.evaluate(() => [document.cookie, JSON.stringify({ ...localStorage }), JSON.stringify({ ...sessionStorage })])).toEqual(["", "{}", "{}"]);
  await page.getByText("No job yet").waitFor();
  await watched.check();
  for (const [hash, empty] of [["#/devices", "No device yet"], ["#/new", "No bundle is here yet"], ["#/benchmarks", "No device has measured anything yet"], ["#/jobs/0123456789abcdef", "There is no such job"], ["#/devices/none", "There is no such device"], ["#/nowhere", "There is no such page"]] as const) {
    await watched.go(hash);
    await page.getByText(empty).waitFor();
    await watched.check();
  }
  await page.reload();
  await page.getByText("There is no such page").waitFor(); // still signed in, and where it was
  await page.getByRole("button", { name: "Sign out" }).click();
  await page.getByText("You are signed out.").waitFor();
  expect(await page.context().cookies()).toEqual([]);
  await page.context().addCookies([cookie!]); // as a thief would have it
  await page.reload();
  await page.getByRole("button", { name: "Sign in" }).waitFor();
  expect(coordinator.process.told()).not.toContain(cookie!.value);
  watched.quiet();
});

test("a join link and its QR code lead to the page where devices join, and no log has them", async () => {
  const coordinator = await Coordinator.start(workshop, "served");
  const watched = await Watched.open(coordinator);
  await watched.signIn();
  await watched.go("#/join");
  const { page } = watched;
  await page.getByLabel("Devices that it enrols").fill("3");
  await page.getByRole("button", { name: "Make a link" }).click();
  const link = await page.getByLabel("Join link", { exact: true }).inputValue();
  expect(link).toMatch(new RegExp(`^${coordinator.url}/join#embrace_enrol_[\\w-]{43}$`));
  const drawn = await page.getByRole("img", { name: "QR code" }).evaluate((svg) => ({ side: (svg as SVGSVGElement).viewBox.baseVal.width, path: svg.querySelector("path")!.getAttribute("d")! }));
  expect(scanned(drawn.side, drawn.path)).toBe(link);
  await watched.check();
  await watched.picture("dashboard-join");
  const phone = await (await workshop.open()).newPage();
  await phone.goto(link);
  await phone.getByText("No job runs now").waitFor();
  expect(coordinator.process.told()).not.toContain(link.split("#")[1]);
  watched.quiet();
});

/** Read a QR code with another program than the one that drew it. */
function scanned(side: number, path: string): string | undefined {
  const SCALE = 4;
  const pixels = new Uint8ClampedArray(4 * (side * SCALE) ** 2).fill(255);
  for (const [, x, y] of path.matchAll(/M(\d+) (\d+)h/g)) {
    for (let row = 0; row < SCALE; row += 1) for (let column = 0; column < SCALE; column += 1) pixels.set([0, 0, 0], 4 * ((Number(y) * SCALE + row) * side * SCALE + Number(x) * SCALE + column));
  }
  return jsQR(pixels, side * SCALE, side * SCALE)?.data;
}

test("create a job in the page, watch devices train, look at one, pause, stop, export, delete", async () => {
  const coordinator = await Coordinator.start(workshop, "served");
  const data = writeDigits(6);
  const watched = await Watched.open(coordinator);
  const { page } = watched;
  await watched.signIn();
  await page.getByRole("link", { name: "New job" }).click();
  await page.getByLabel("Send a bundle from this computer").setInputFiles(bundlePath());
  await page.getByText("Sent and checked").waitFor();
  await page.getByLabel("Name").fill("Handwritten digits");
  await page.getByLabel("Rounds", { exact: false }).first().fill("400");
  await page.getByLabel("Devices to begin").fill("5");
  await page.getByLabel("Devices score every version").check();
  await watched.check();
  await watched.picture("dashboard-new-job");
  await page.getByRole("tab", { name: "Form" }).focus();
  await page.keyboard.press("ArrowRight");
  expect(await page.getByRole("tab", { name: "Job file" }).evaluate((tab) => tab === document.activeElement && tab.ariaSelected === "true")).toBe(true);
  const text = await page.getByLabel("job.toml").inputValue();
  await page.getByLabel("job.toml").fill(text.replace("steps = 10", "steps = -1"));
  await page.getByRole("button", { name: "Create job" }).click();
  await page.getByText(/line \d+.*steps/).waitFor();
  await page.getByLabel("job.toml").fill(text.replace("[local]", "deadline = 4.0\nquorum = 0.5\n\n[local]"));
  await page.getByRole("button", { name: "Create job" }).click();
  await page.getByText("needs 5 more devices").waitFor();
  const id = page.url().split("/").at(-1)!;
  const agents = [
    coordinator.agent("jetson", data[0]!, "--tier", "strong"),
    coordinator.agent("pi-5", data[1]!, "--tier", "strong"),
    coordinator.agent("pi-4", data[2]!, "--tier", "moderate"),
    coordinator.agent("phone", data[3]!, "--tier", "weak"),
    coordinator.agent("kitchen-pi", data[4]!, "--tier", "weak"),
  ];
  const odd = coordinator.agent("old-tablet", data[5]!, "--memory", "90MB");
  const why = (): string => [...agents, odd].map((agent) => agent.told()).join("\n");
  await until(async () => (await coordinator.version(id)) >= 12, why);
  await page.getByRole("heading", { name: "Layers and their trainers" }).waitFor();
  await page.getByRole("img", { name: /^Accuracy: .*from/ }).waitFor();
  const before = Number(await page.locator(".tile").first().locator("dd").evaluate((cell) => cell.firstChild!.textContent));
  expect(before).toBeGreaterThan(0);
  await until(async () => Number(await page.locator(".tile").first().locator("dd").evaluate((cell) => cell.firstChild!.textContent)) > before); // by itself
  await stopped(agents[4]!, "SIGKILL"); // one is gone in the middle: the round goes on without it
  await until(async () => (await coordinator.version(id)) >= 24, why);
  await watched.check();
  await watched.picture("dashboard");
  await page.emulateMedia({ colorScheme: "dark" });
  await watched.check();
  await page.getByRole("heading", { name: "Layers and their trainers" }).evaluate((heading) => scrollTo(0, heading.getBoundingClientRect().top + scrollY - 90));
  await watched.picture("dashboard-dark");
  await page.emulateMedia({ colorScheme: "light" });

  await page.getByRole("button", { name: "Pause" }).click();
  await page.getByText("paused until it is resumed").waitFor();
  await page.getByRole("button", { name: "Resume" }).click();
  await page.getByRole("button", { name: "Pause" }).waitFor();
  await page.getByRole("button", { name: "Stop" }).click();
  await page.getByRole("button", { name: "Cancel" }).click();
  expect((await coordinator.json(`/v1/jobs/${id}`)).state).toBe("running");

  await page.getByRole("link", { name: "Devices", exact: true }).click();
  await page.getByRole("link", { name: "pi-4" }).waitFor();
  await watched.check();
  await watched.picture("dashboard-devices");
  await page.getByRole("button", { name: "Failures" }).click();
  expect(await page.getByRole("columnheader", { name: "Failures" }).getAttribute("aria-sort")).toBe("descending");
  await page.getByRole("link", { name: "pi-4" }).click();
  await page.getByRole("heading", { name: "Where its time goes" }).waitFor();
  await page.getByText("Handwritten digits").waitFor();
  await watched.check();
  await watched.picture("dashboard-device");

  await watched.go(`#/jobs/${id}`);
  await page.getByRole("button", { name: "Stop" }).click();
  await page.getByRole("button", { name: "Stop it" }).click();
  await page.getByRole("button", { name: "Delete" }).waitFor();
  const version = await coordinator.version(id);
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("link", { name: `Bundle of version ${version}` }).click()]);
  expect(download.suggestedFilename()).toBe(`Handwritten-digits-v${version}.zip`);
  const files = unzipSync(readFileSync(await download.path()));
  const folder = `Handwritten-digits-v${version}`;
  const manifest = JSON.parse(new TextDecoder().decode(files[`${folder}/manifest.json`])) as { weights: { name: string } };
  const weights = await (await coordinator.call(`/v1/jobs/${id}/versions/${version}/file`)).arrayBuffer();
  expect(Buffer.compare(Buffer.from(files[`${folder}/${manifest.weights.name}`]!), Buffer.from(weights))).toBe(0);

  await page.getByRole("button", { name: "Delete" }).click();
  await page.getByRole("button", { name: "Delete it" }).click();
  await page.getByText("No job yet").waitFor();
  watched.quiet();
});

test("benchmarks of devices, side by side", async () => {
  const coordinator = await Coordinator.start(workshop, "served");
  await coordinator.job(JOB(5, "[participate]\nmin_available = 9"));
  const [job] = (await coordinator.json("/v1/jobs")) as { bundle: string }[];
  const boundaries = ["conv1", "conv3", "dense"];
  const watched = await Watched.open(coordinator);
  const { page } = watched;
  await watched.signIn();
  await page.getByRole("link", { name: "Benchmarks" }).click();
  await page.getByText("No device has measured anything yet").waitFor();
  for (const [name, pace] of [["pi-4", 4], ["pi-5", 1.5], ["<b>phone</b>", 2.5]] as const) {
    const enrolled = await fetch(`${coordinator.url}/v1/devices`, { method: "POST", headers: { Authorization: `Bearer ${coordinator.enrolment}`, "Content-Type": "application/json" }, body: JSON.stringify({ name }) });
    const { token } = (await enrolled.json()) as { token: string };
    const costs = boundaries.map((boundary, at) => ({
      boundary,
      tiers: [["strong", "moderate", "weak"][at]!],
      seconds: { load: 0.1 * pace, frozen_forward: 0.01 * at * pace, activation_io: 0.001, training: (0.06 - 0.02 * at) * pace, optimiser: 0.001, batch: 0.1, low: 0.01, high: 0.5 },
      memory: 20_000_000 - 5_000_000 * at,
    }));
    if (name === "pi-4") costs[0] = { boundary: "conv1", tiers: ["strong"], problem: "needs 77 MB, 40 MB are free" } as unknown as (typeof costs)[0];
    const benchmark = { bundle: job!.bundle, model: "digits", batch: 32, iterations: 20, runtime: "onnxruntime, portable", threads: 4, processor: "a board", costs };
    const sent = await fetch(`${coordinator.url}/v1/devices/me/benchmark`, { method: "PUT", headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" }, body: JSON.stringify(benchmark) });
    expect(sent.status, await sent.text()).toBe(200);
  }
  await page.getByRole("img", { name: /^Time of a batch: .*pi-5 \(4 threads\) from 92 ms to 62 ms/ }).waitFor();
  await page.getByText("needs 77 MB, 40 MB are free").waitFor();
  await page.getByRole("checkbox", { name: "<b>phone</b> (4 threads)" }).uncheck();
  await until(async () => !(await page.getByRole("img", { name: /^Peak memory/ }).getAttribute("aria-label"))!.includes("phone"));
  await watched.check();
  await page.getByRole("checkbox", { name: "<b>phone</b> (4 threads)" }).check();
  watched.quiet();
});

test("200 devices, hostile names, a failed job, a phone, a restart of the coordinator", async () => {
  const coordinator = await Coordinator.start(workshop, "served");
  const id = await coordinator.job(JOB(40, "[participate]\nmin_available = 180\nquorum = 0.6\ndeadline = 15.0\n[bounds]\noffer = 60.0"));
  const stoppedEarly = await coordinator.job(JOB(5, "[participate]\nmin_available = 300"));
  await coordinator.call(`/v1/jobs/${stoppedEarly}/stop`, "POST");
  const invited = (await (await coordinator.call("/v1/enrolments", "POST", { uses: 200, seconds: 3600 })).json()) as { token: string };
  const crowd = workshop.python("crowd", join(ROOT, "browser/tests/chromium/crowd.py"), coordinator.url, invited.token, "200", "4");
  const watched = await Watched.open(coordinator, PHONE);
  const { page } = watched;
  await watched.signIn();
  await until(() => crowd.exitCode !== null, crowd.told);
  expect(crowd.told()).toContain("done");
  await page.getByText("Handwritten digits").first().waitFor();
  await watched.check();
  await watched.picture("dashboard-phone");
  await page.getByRole("link", { name: "Devices", exact: true }).click();
  await page.getByText("200 of 200").waitFor();
  const text = await page.innerText("main");
  expect(text).toContain("<img src=x onerror=alert(1)>");
  expect(text).toContain("\\n\\x1b[2J\\u202e<b>bold</b>");
  expect(text).not.toMatch(/[\u202e\u001b]/);
  const first = await page.locator("tbody tr").first().innerText();
  expect(first).toContain("out_of_memory"); // worst first
  await watched.check();
  await watched.picture("dashboard-phone-devices");
  await page.getByPlaceholder("Search").fill("台所");
  await page.getByText("1 of 200").waitFor();
  await watched.go(`#/jobs/${id}`);
  await page.getByRole("heading", { name: "Devices and rounds" }).waitFor();
  await watched.check();
  await page.setViewportSize({ width: 1280, height: 900 });
  await watched.check();

  await stopped(coordinator.process, "SIGKILL");
  await page.getByText("connection lost").waitFor();
  await coordinator.serve();
  await page.getByText("live", { exact: true }).waitFor();
  await coordinator.call(`/v1/jobs/${id}/pause`, "POST"); // told by the stream that was opened again, with the same session
  await page.getByRole("button", { name: "Resume" }).waitFor();

  await stopped(coordinator.process);
  rmSync(join(coordinator.folder, "bundles"), { recursive: true }); // a disk that lost what the job needs
  await coordinator.serve();
  await page.getByText("failed", { exact: true }).waitFor();
  await page.getByText("it cannot be continued").waitFor();
  await watched.check();
  expect(watched.complaints.filter((each) => !/ERR_|Failed to load|net::|MIME/.test(each))).toEqual([]);
});
