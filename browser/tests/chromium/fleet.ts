/** A real coordinator, real Python agents and a real browser for tests. */
import { execFileSync, spawn, type ChildProcess } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import { zipSync } from "fflate";
import { chromium, type Browser, type BrowserContext, type Page } from "playwright-core";

const ROOT = fileURLToPath(new URL("../../..", import.meta.url));
const PYTHON = process.env.PYTHON ?? join(ROOT, ".venv/bin/python");
export const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
const FLAGS = ["--no-sandbox", "--disable-gpu", "--use-fake-device-for-media-stream"]; // a camera that shows a test picture
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
  private readonly processes: ChildProcess[] = [];
  private browser: Browser | undefined;

  run(name: string, ...args: string[]): ChildProcess & { told: () => string } {
    const child = spawn(PYTHON, ["-m", "embrace", ...args], { cwd: ROOT, env: { ...process.env, COLUMNS: "300" } });
    let text = "";
    for (const stream of [child.stdout, child.stderr]) stream.on("data", (chunk: Buffer) => (text += chunk.toString()));
    this.processes.push(child);
    return Object.assign(child, { told: () => `${name}: ${text}` });
  }

  async open(flags: readonly string[] = FLAGS): Promise<BrowserContext> {
    this.browser ??= await chromium.launch({ executablePath: CHROMIUM, args: [...flags] });
    return this.browser.newContext({ viewport: { width: 390, height: 844 }, acceptDownloads: false, permissions: ["camera"] });
  }

  async close(): Promise<void> {
    await this.browser?.close();
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

  private constructor(
    private readonly workshop: Workshop,
    readonly folder: string,
    private readonly port: number,
  ) {}

  static async start(workshop: Workshop, name: string): Promise<Coordinator> {
    const made = new Coordinator(workshop, join(workshop.folder, name), await freePort());
    await made.serve();
    return made;
  }

  /** Begin, or begin again after `stopped`, at the same address. */
  async serve(): Promise<void> {
    const child = this.workshop.run("serve", "serve", "--data", this.folder, "--port", String(this.port));
    this.process = child;
    await until(() => {
      if (child.exitCode !== null) throw new Error(child.told());
      return child.told().includes("startup complete");
    }, child.told);
    this.url = /coordinator: (\S+)/.exec(child.told())![1]!;
    this.enrolment = /embrace_enrol_[\w-]+/.exec(child.told())![0];
  }

  async call(path: string, method = "GET", body?: unknown): Promise<Response> {
    const admin = readFileSync(join(this.folder, "admin.token"), "utf8").trim();
    const headers = { Authorization: `Bearer ${admin}`, "Content-Type": "application/json" };
    const answer = await fetch(this.url + path, { method, headers, ...(body ? { body: JSON.stringify(body) } : {}) });
    if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status} ${await answer.text()}`);
    return answer;
  }

  async json(path: string): Promise<any> {
    return (await this.call(path)).json();
  }

  /** Send a bundle and start a job; returns its id. */
  async job(toml: string): Promise<string> {
    const file = join(this.folder, "job.toml");
    writeFileSync(file, toml);
    const child = this.workshop.run("job", "job", "create", file, "--server", this.url, "--token", `@${this.folder}/admin.token`, "--json");
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

  get link(): string {
    return `${this.url}/join#${this.enrolment}`;
  }
}

/** Open the link, pick data, and press Join. */
export async function joinWith(page: Page, link: string, data: string, name: string, picker = "A file"): Promise<void> {
  await page.goto(link);
  await page.setInputFiles(`label:has-text("${picker}") input`, data);
  await page.getByText("samples of").first().waitFor();
  await page.getByLabel("Name of this device").fill(name);
  await page.getByRole("button", { name: "Join" }).click();
}

/** How many rounds the page says it has helped with. */
export async function helped(page: Page): Promise<number> {
  const shown = page.getByTestId("rounds");
  return (await shown.count()) > 0 ? Number(await shown.textContent()) : 0;
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

function freePort(): Promise<number> {
  return new Promise((resolve) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address() as { port: number };
      server.close(() => resolve(port));
    });
  });
}

export function bundlePath(): string {
  return join(ROOT, "embrace/demo/digits/model");
}

if (!existsSync(join(ROOT, "coordinator/web/join.html"))) throw new Error("the page is not built: make web");
