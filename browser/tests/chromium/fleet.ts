/** A real coordinator, real Python agents and a real browser for tests. */
import { execFileSync, spawn, type ChildProcess } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import { zipSync } from "fflate";
import { chromium, type Browser, type BrowserContext, type BrowserContextOptions, type Page } from "playwright-core";

export const ROOT = fileURLToPath(new URL("../../..", import.meta.url));
export const PYTHON = process.env.PYTHON ?? join(ROOT, ".venv/bin/python");
export const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
export const FLAGS = [
  "--no-sandbox",
  "--disable-gpu",
  "--use-fake-device-for-media-stream", // a camera that shows a test picture
  "--host-resolver-rules=MAP lab.test 127.0.0.1", // a name that is not this machine's own
];
const PICTURES = join(ROOT, process.env.SCREENSHOTS || "build/screenshots"); // of the documentation
export const PHONE = { width: 390, height: 844 };
const PATIENCE = 240_000; // milliseconds until something that should happen is given up

/** Look until it is so. */
export async function until<T>(look: () => T | Promise<T>, why: () => string = () => "it never happened"): Promise<NonNullable<T>> {
  const end = Date.now() + PATIENCE;
  for (;;) {
    const found = await look();
    if (found) return found;
    if (Date.now() > end) throw new Error(why());
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** Everything of one test: processes and files that end with it. */
export class Workshop {
  readonly folder = mkdtempSync(join(tmpdir(), "embrace-browser-"));
  readonly problems: string[] = []; // that pages reported: errors, and what their policy forbade
  readonly requests: string[] = [];
  readonly origins = new Set<string>(); // of coordinators
  private readonly processes: ChildProcess[] = [];
  private readonly browsers: Browser[] = [];

  run(name: string, ...args: string[]): ChildProcess & { told: () => string } {
    return this.python(name, "-m", "embrace", ...args);
  }

  python(name: string, ...args: string[]): ChildProcess & { told: () => string } {
    const child = spawn(PYTHON, args, { cwd: ROOT, env: { ...process.env, COLUMNS: "300", PYTHONPATH: ROOT } });
    let text = "";
    for (const stream of [child.stdout, child.stderr]) stream.on("data", (chunk: Buffer) => (text += chunk.toString()));
    this.processes.push(child);
    return Object.assign(child, { told: () => `${name}: ${text}` });
  }

  /** Open a browser's own storage; everything that its pages ask for and complain about is noted. */
  async open(flags: readonly string[] = FLAGS, options: BrowserContextOptions = {}): Promise<BrowserContext> {
    const browser = await chromium.launch({ executablePath: CHROMIUM, args: [...flags] });
    this.browsers.push(browser);
    const context = await browser.newContext({ viewport: PHONE, acceptDownloads: false, permissions: ["camera"], ...options });
    context.on("request", (request) => this.requests.push(request.url()));
    context.on("weberror", (error) => this.problems.push(String(error.error())));
    context.on("console", (message) => message.type() === "error" && this.problems.push(message.text()));
    await context.exposeFunction("policyViolated", (what: string) => this.problems.push(what));
    await context.addInitScript(() => {
      const tell = (event: SecurityPolicyViolationEvent): void =>
        (globalThis as unknown as { policyViolated(what: string): void }).policyViolated(`policy: ${event.violatedDirective} ${event.blockedURI}`);
      document.addEventListener("securitypolicyviolation", tell);
    });
    return context;
  }

  /** Fail if a page asked another origin for anything, or reported an error; outages that a test made are none. */
  check(): void {
    const strange = this.requests.filter((url) => !url.startsWith("blob:") && !this.origins.has(new URL(url).origin));
    if (strange.length > 0) throw new Error(`requests to other origins: ${strange.join(" ")}`);
    const problems = this.problems.filter((each) => !/ERR_CONNECTION|Failed to load resource/.test(each));
    if (problems.length > 0) throw new Error(`a page reported: ${problems.join("\n")}`);
  }

  async close(): Promise<void> {
    for (const browser of this.browsers) await browser.close();
    await Promise.all(this.processes.map((child) => stopped(child)));
    rmSync(this.folder, { recursive: true, force: true });
  }
}

/** End a process that this test started. */
export async function stopped(child: ChildProcess, signal: NodeJS.Signals = "SIGTERM"): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const gone = new Promise((resolve) => child.once("exit", resolve));
  child.kill(signal);
  const hard = setTimeout(() => child.kill("SIGKILL"), 10_000);
  await gone;
  clearTimeout(hard);
}

export class Coordinator {
  url = "";
  enrolment = "";
  process!: ReturnType<Workshop["run"]>;
  private port = 0; // a free one, and from then on the same

  private constructor(
    private readonly workshop: Workshop,
    readonly folder: string,
    private readonly options: readonly string[],
  ) {}

  static async start(workshop: Workshop, name: string, ...options: string[]): Promise<Coordinator> {
    const made = new Coordinator(workshop, join(workshop.folder, name), options);
    await made.serve();
    return made;
  }

  /** Begin, or begin again after `stopped`, at the same address. */
  async serve(): Promise<void> {
    const child = this.workshop.run("serve", "serve", "--data", this.folder, "--port", String(this.port), ...this.options);
    this.process = child;
    await until(() => {
      if (child.exitCode !== null) throw new Error(child.told());
      return child.told().includes("startup complete");
    }, child.told);
    this.url = /coordinator: (\S+)/.exec(child.told())![1]!;
    this.port = Number(new URL(this.url).port);
    this.workshop.origins.add(this.url);
    this.enrolment = /embrace_enrol_[\w-]+/.exec(child.told())![0];
  }

  async call(path: string, method = "GET", body?: unknown): Promise<Response> {
    const headers = { Authorization: `Bearer ${this.admin}`, "Content-Type": "application/json" };
    const answer = await fetch(this.url + path, { method, headers, ...(body ? { body: JSON.stringify(body) } : {}) });
    if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status} ${await answer.text()}`);
    return answer;
  }

  async json(path: string): Promise<any> {
    return (await this.call(path)).json();
  }

  /** Send a bundle and start a job; returns its id. */
  async job(toml: string, ...options: string[]): Promise<string> {
    const file = join(this.folder, "job.toml");
    writeFileSync(file, toml);
    const about = ["--server", this.url, "--token", `@${this.folder}/admin.token`, "--json", ...options];
    const child = this.workshop.run("job", "job", "create", file, ...about);
    await until(() => child.exitCode !== null, child.told);
    if (child.exitCode !== 0) throw new Error(child.told());
    return /"id": ?"([0-9a-f]+)"/.exec(child.told())![1]!;
  }

  agent(name: string, data: string, ...more: string[]): ReturnType<Workshop["run"]> {
    const work = join(this.workshop.folder, `work-${this.port}-${name}`);
    const about = ["--server", this.url, "--token", this.enrolment, "--name", name, "--data", data, "--work", work];
    return this.workshop.run(name, "agent", ...about, "--engine", "portable", ...more);
  }

  async version(job: string): Promise<number> {
    return ((await this.json(`/v1/jobs/${job}`)) as { version: number }).version;
  }

  async weights(job: string, version: number): Promise<Float32Array> {
    const body = new Uint8Array(await (await this.call(`/v1/jobs/${job}/versions/${version}/file`)).arrayBuffer());
    const start = 8 + Number(new DataView(body.buffer).getBigUint64(0, true));
    return new Float32Array(body.slice(start).buffer);
  }

  get admin(): string {
    return readFileSync(join(this.folder, "admin.token"), "utf8").trim();
  }

  get link(): string {
    return `${this.url}/join#${this.enrolment}`;
  }
}

/** Open the link, pick data, and press Join. */
export async function joinWith(page: Page, link: string, data: string, name: string, picker = "A file"): Promise<void> {
  await page.goto(link);
  await pick(page, data, picker);
  await page.getByLabel("Name of this device").fill(name);
  await page.getByRole("button", { name: "Join" }).click();
}

/** Pick data that is good. */
export async function pick(page: Page, data: string, picker = "A file"): Promise<void> {
  await page.setInputFiles(`label:has-text("${picker}") input`, data);
  await page.getByText("samples of").first().waitFor();
}

/** Wait until the page is in the middle of a round's training. */
export async function inTheMiddle(page: Page): Promise<void> {
  const atWork = (): boolean => {
    const bar = document.querySelector("progress");
    return bar !== null && bar.value > 0 && bar.value < bar.max;
  };
  await page.waitForFunction(atWork, undefined, { timeout: PATIENCE });
}

/** How many rounds the page says it has helped with. */
export async function helped(page: Page): Promise<number> {
  const shown = page.getByTestId("rounds");
  return (await shown.count()) > 0 ? Number(await shown.textContent()) : 0;
}

/** Make a picture of the whole page, or of what is in sight, for the documentation; with few colours so that it is small. */
export async function picture(page: Page, name: string, fullPage = true, colours = 64): Promise<void> {
  mkdirSync(PICTURES, { recursive: true });
  const file = join(PICTURES, name);
  await page.screenshot({ path: file, fullPage, animations: "disabled" });
  const program = "import sys; from PIL import Image; Image.open(sys.argv[1]).convert('RGB').quantize(int(sys.argv[2]), Image.Quantize.MAXCOVERAGE, dither=0).save(sys.argv[1], optimize=True)";
  execFileSync(PYTHON, ["-c", program, file, String(colours)]);
}

/** Write digits-like samples as numpy's savez would. */
export function writeSamples(folder: string, name: string, count: number, salt: number): string {
  mkdirSync(folder, { recursive: true });
  const x = Uint8Array.from({ length: count * 64 }, (_, i) => (i * 7919 + salt * 104729 + Math.floor(i / 64) * 31) % 17 * 15);
  const y = BigInt64Array.from({ length: count }, (_, i) => BigInt((i * 7 + salt) % 10));
  const file = join(folder, name);
  writeFileSync(file, zipSync({ "x.npy": npy("|u1", [count, 1, 8, 8], x), "y.npy": npy("<i8", [count], y) }, { level: 0 }));
  return file;
}

/** Write real digits, a hundred of them, as numpy's savez would. */
export function writeDigits(folder: string): string {
  const file = join(folder, "my digits.npz");
  const program = `
import sys, numpy as np
found = np.load(sys.argv[1])
np.savez(sys.argv[2], x=(found["x"][:100, None] / 16).astype(np.float32), y=found["y"][:100].astype(np.int64))
`;
  execFileSync(PYTHON, ["-c", program, join(ROOT, "simulation/datasets/digits.npz"), file]);
  return file;
}

/** Write digits-like samples as a table: a label, then 64 numbers. */
export function writeTable(folder: string): string {
  const pixels = (line: number): number[] => Array.from({ length: 64 }, (_, at) => ((line * 31 + at * 7919) % 17) / 16);
  const lines = Array.from({ length: 30 }, (_, line) => [(line * 7) % 10, ...pixels(line)].join(","));
  const file = join(folder, "table.csv");
  writeFileSync(file, [["label", ...pixels(0).map((_, at) => `p${at}`)].join(","), ...lines, ""].join("\n"));
  return file;
}

/** Write photos as PNG files, a folder for each of ten classes. */
export function writePhotos(folder: string): string {
  const program = `
import sys, pathlib, numpy as np
from PIL import Image
for number in range(30):
    place = pathlib.Path(sys.argv[1]) / f"class {number % 10}"
    place.mkdir(parents=True, exist_ok=True)
    pixels = (np.arange(20 * 8 * 3) * 73 + number * 977) % 256
    Image.fromarray(pixels.astype(np.uint8).reshape(20, 8, 3)).save(place / f"photo {number}.png")
`;
  execFileSync(PYTHON, ["-c", program, folder]);
  return folder;
}

function npy(descr: string, shape: number[], data: ArrayBufferView): Uint8Array {
  const text = `{'descr': '${descr}', 'fortran_order': False, 'shape': (${shape.join(", ")},), }`;
  const header = text.padEnd(64 * Math.ceil((text.length + 11) / 64) - 11) + "\n";
  const found = new Uint8Array(10 + header.length + data.byteLength);
  found.set([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0, header.length & 255, header.length >> 8]);
  found.set(new TextEncoder().encode(header), 10);
  found.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), 10 + header.length);
  return found;
}

export function bundlePath(): string {
  return join(ROOT, "embrace/demo/digits/model");
}

/** A job on the digits of the demo. */
export function digitsJob({ rounds = 1000, count = 1, steps = 6, batch = 8, more = "", bundle = bundlePath() } = {}): string {
  return `
bundle = "${bundle}"
name = "handwritten digits"
num_rounds = ${rounds}
seed = 3
${more}
[participate]
count = ${count}
min_available = ${count}
quorum = 1.0
[local]
steps = ${steps}
batch = ${batch}
rate = "0.02"
`;
}

if (!existsSync(join(ROOT, "coordinator/web/join.html"))) throw new Error("the page is not built: make web");
