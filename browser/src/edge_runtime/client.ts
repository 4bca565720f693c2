/**
 * The coordinator's REST interface as a device uses it.
 *
 * What may be repeated is repeated: after a lost connection or a busy server, with a growing and random pause, for as
 * long as the caller's patience lasts. What the server refuses is not.
 */
import type { Benchmark } from "../federation/benchmark.ts";
import { BundleError, EmbraceError, InputError, messageOf } from "../federation/errors.ts";
import { decodeOffer, type Report, type TaskOffer } from "../federation/messages.ts";
import type { MeasuredNeed } from "../federation/capacity.ts";
import type { Bytes } from "../federation/space.ts";

export const FIRST_PAUSE = 0.5;
export const LONGEST_PAUSE = 30;
const AGAIN = new Set([408, 425, 429, 500, 502, 503, 504, 507]);
const READ_SECONDS = 90;
const PATIENCE = 600; // seconds
const [SOONEST_BACK, LONGEST_AWAY] = [2, 4 * 3600]; // seconds that a device stays away, whatever the coordinator says
const MOST_ANSWER = 2 ** 20; // bytes of an answer in JSON
const MOST_MANIFEST = 2 ** 26;

/** The coordinator did not answer for longer than was allowed. */
export class Unreachable extends EmbraceError {}

/** The coordinator answered, and the answer is no. */
export class Declined extends InputError {
  constructor(
    message: string,
    readonly answer: number,
    readonly why = "",
  ) {
    super(message);
  }

  /** Whether the credential is refused: nothing that this device asks later is answered. */
  get isFinal(): boolean {
    return this.answer === 401 || this.answer === 403;
  }
}

/** What a device says about itself. */
export interface Profile {
  readonly memory: number | null;
  readonly threads: number;
  readonly runtime: string;
  readonly engines: readonly ["portable"];
  readonly needs: readonly MeasuredNeed[];
}

/** A job that a device could take part in, before it joins. */
export interface OpenJob {
  readonly id: string;
  readonly name: string;
  readonly bundle: string;
  readonly batch: number;
  readonly steps: number;
  readonly epochs: number | null;
  readonly round: number;
  readonly rounds: number;
  readonly manifest: unknown;
}

export interface ClientOptions {
  readonly signal?: AbortSignal;
  readonly patience?: number; // seconds
  readonly trouble?: (why: string) => void; // hears why something is tried again, "" when it works again
}

/** Wait, unless told to stop. */
export function pause(seconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = (): void => (clearTimeout(timer), reject(signal!.reason as Error));
    const timer = setTimeout(() => (signal?.removeEventListener("abort", stop), resolve()), 1000 * seconds);
    if (signal?.aborted) stop();
    signal?.addEventListener("abort", stop, { once: true });
  });
}

/** Read in how many seconds to come back, within the device's own bounds. */
function away(told: string | null): number | undefined {
  return told !== null && /^[0-9]{1,9}$/.test(told) ? Math.min(Math.max(SOONEST_BACK, Number(told)), LONGEST_AWAY) : undefined;
}

interface Request {
  readonly body?: Bytes | string;
  readonly headers?: Record<string, string>;
  readonly most?: number; // bytes of the answer
}

interface Answer {
  readonly status: number;
  readonly headers: Headers;
  readonly body: Bytes;
}

export class DeviceClient {
  waiting = ""; // why there is no task, as the last answer to `nextTask` has it
  comeBack: number | undefined; // seconds after which to ask for a task, if that answer says so
  lease: number | undefined; // seconds for which the last task that came may be worked at in silence
  received = 0; // bytes of answers

  constructor(
    private readonly server: string,
    private readonly token: string,
    private readonly options: ClientOptions = {},
  ) {}

  /** Ask what is trained here; an enrolment token suffices. */
  async openJobs(): Promise<OpenJob[]> {
    const answer = await this.call("GET", "/v1/jobs/open", { most: MOST_MANIFEST });
    return (json(answer).jobs as OpenJob[] | undefined) ?? [];
  }

  /** Enrol and return (device, its own token); the client's token is an enrolment token here. */
  async enrol(name: string, profile: Profile): Promise<{ device: string; token: string }> {
    const found = json(await this.call("POST", "/v1/devices", jsonBody({ name, profile })));
    if (typeof found.device !== "string" || typeof found.token !== "string") throw new EmbraceError("the coordinator's answer makes no sense");
    return { device: found.device, token: found.token };
  }

  async setProfile(profile: Profile): Promise<void> {
    await this.call("PUT", "/v1/devices/me/profile", jsonBody(profile));
  }

  /** Tell what training costs here, in place of what was told before under the same conditions. */
  async sendBenchmark(found: Benchmark): Promise<void> {
    await this.call("PUT", "/v1/devices/me/benchmark", jsonBody(found));
  }

  /** Ask the coordinator to forget this device: its token is good for nothing afterwards. */
  async leave(): Promise<void> {
    await this.call("DELETE", "/v1/devices/me");
  }

  async nextTask(wait: number): Promise<TaskOffer | undefined> {
    const answer = await this.call("POST", `/v1/tasks/next?wait=${wait}`);
    const told = (header: string): string => decodeURIComponent(answer.headers.get(header) ?? "");
    const unfit = told("Embrace-Unfit");
    this.waiting = unfit ? `no job can use this device: ${unfit}` : told("Embrace-Waiting");
    this.comeBack = away(answer.headers.get("Retry-After"));
    this.lease = Number(answer.headers.get("Embrace-Lease")) || undefined;
    return answer.status === 204 ? undefined : decodeOffer(json(answer));
  }

  /** Keep a task; returns for how many seconds the device may be silent. One attempt: the next one follows soon. */
  async heartbeat(task: string): Promise<number> {
    const { seconds } = json(await this.call("POST", `/v1/tasks/${task}/heartbeat`, {}, 0));
    return typeof seconds === "number" && seconds > 0 ? seconds : 60;
  }

  /** Ask whether a job is running or paused, or how it ended. */
  async jobState(job: string): Promise<string> {
    return String(json(await this.call("GET", `/v1/jobs/${job}/state`)).state);
  }

  /** Fetch the signature of a bundle; undefined if it has none. */
  async signature(bundle: string): Promise<Bytes | undefined> {
    try {
      return (await this.call("GET", `/v1/bundles/${bundle}/signature`, { most: 4096 })).body;
    } catch (error) {
      if (error instanceof Declined && error.answer === 404) return undefined;
      throw error;
    }
  }

  async manifest(bundle: string): Promise<string> {
    const { body } = await this.call("GET", `/v1/bundles/${bundle}/manifest`, { most: MOST_MANIFEST });
    if ((await sha256(body)) !== bundle) throw new BundleError("the manifest that came does not have the sha256 of the task's bundle");
    return new TextDecoder().decode(body);
  }

  async graph(digest: string, size: number): Promise<Bytes> {
    const { body } = await this.call("GET", `/v1/graphs/${digest}`, { most: size });
    if ((await sha256(body)) !== digest) throw new BundleError(`the graph that came does not have the sha256 ${digest}`);
    return body;
  }

  /** Fetch bytes [start, stop) of a version's file; a broken connection is resumed where it was. */
  async weights(job: string, version: number, start: number, stop: number): Promise<Bytes> {
    const found = new Uint8Array(stop - start);
    let done = 0;
    while (done < found.length) {
      const headers = { Range: `bytes=${start + done}-${stop - 1}` };
      const answer = await this.call("GET", `/v1/jobs/${job}/versions/${version}/weights`, { headers, most: found.length - done });
      if (answer.status !== 206) throw new Declined("the coordinator sent everything instead of a part", answer.status);
      if (answer.body.length === 0) throw new Unreachable("the coordinator sent nothing of what it promised");
      found.set(answer.body, done);
      done += answer.body.length;
    }
    return found;
  }

  /** Fetch the body of a part of a vector of a version. */
  async part(job: string, version: number, name: string, boundary: string, unit: number | undefined, most: number): Promise<Bytes> {
    const asked = new URLSearchParams({ boundary, ...(unit === undefined ? {} : { unit: String(unit) }) });
    return (await this.call("GET", `/v1/jobs/${job}/versions/${version}/parts/${name}?${asked}`, { most })).body;
  }

  /** Fetch the update that the holder of a task goes on with. */
  async inherited(task: string, most: number): Promise<Bytes> {
    return (await this.call("GET", `/v1/tasks/${task}/inherited`, { most })).body;
  }

  /** Send an update; a repetition is harmless. */
  async sendUpdate(task: string, body: Bytes, report: Report): Promise<void> {
    const digest = await crypto.subtle.digest("SHA-256", body);
    const headers = {
      "Embrace-Report": JSON.stringify(report).replace(/[\u007f-\uffff]/g, "?"),
      "Content-Digest": `sha-256=:${btoa(String.fromCharCode(...new Uint8Array(digest)))}:`,
      "Content-Type": "application/octet-stream",
    };
    try {
      await this.call("PUT", `/v1/tasks/${task}/update`, { body, headers });
    } catch (error) {
      if (!(error instanceof Declined) || error.why !== "duplicate") throw error; // else it did arrive
    }
  }

  async fail(task: string, reason: string, message: string): Promise<void> {
    await this.call("POST", `/v1/tasks/${task}/failure`, jsonBody({ reason, message: message.slice(0, 2000) }));
  }

  private async call(method: string, path: string, request: Request = {}, patience = this.options.patience ?? PATIENCE): Promise<Answer> {
    const { signal, trouble = () => {} } = this.options;
    let [waited, length] = [0, FIRST_PAUSE];
    for (;;) {
      let why: string;
      try {
        const answer = await this.send(method, path, request);
        if (!AGAIN.has(answer.status)) {
          if (waited > 0) trouble("");
          return checked(answer);
        }
        why = `the coordinator answered ${answer.status}`;
      } catch (error) {
        if (error instanceof EmbraceError) throw error;
        signal?.throwIfAborted();
        why = messageOf(error);
      }
      if (waited >= patience) throw new Unreachable(`the coordinator cannot be reached: ${why}`);
      trouble(why);
      const seconds = length * (0.5 + Math.random()); // so that a fleet does not come back all at once
      await pause(seconds, signal);
      waited += seconds;
      length = Math.min(2 * length, LONGEST_PAUSE);
    }
  }

  private async send(method: string, path: string, { body, headers, most = MOST_ANSWER }: Request): Promise<Answer> {
    const { signal } = this.options;
    const limit = AbortSignal.timeout(1000 * READ_SECONDS);
    const response = await fetch(this.server + path, {
      method,
      headers: { Authorization: `Bearer ${this.token}`, ...headers },
      ...(body === undefined ? {} : { body }),
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
    });
    const found = await bounded(response, response.ok ? most : MOST_ANSWER);
    this.received += found.length;
    return { status: response.status, headers: response.headers, body: found };
  }
}

/** Compute a digest as hexadecimal digits. */
export async function sha256(bytes: Bytes): Promise<string> {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Read the body of an answer, which is not believed to be short. */
async function bounded(response: Response, most: number): Promise<Bytes> {
  const parts: Uint8Array[] = [];
  let size = 0;
  const reader = response.body?.getReader(); // Safari cannot iterate over a body
  for (let next = await reader?.read(); next !== undefined && !next.done; next = await reader!.read()) {
    size += next.value.length;
    if (size > most) {
      void reader!.cancel();
      throw new EmbraceError(`the coordinator's answer goes on after ${most} bytes`);
    }
    parts.push(next.value);
  }
  const found = new Uint8Array(size);
  let done = 0;
  for (const part of parts) {
    found.set(part, done);
    done += part.length;
  }
  return found;
}

function jsonBody(value: unknown): Request {
  return { body: JSON.stringify(value), headers: { "Content-Type": "application/json" } };
}

function json(answer: Answer): Record<string, unknown> {
  try {
    const found: unknown = JSON.parse(new TextDecoder().decode(answer.body));
    if (typeof found === "object" && found !== null && !Array.isArray(found)) return found as Record<string, unknown>;
  } catch {
    // said below
  }
  throw new EmbraceError("expected a JSON object from the coordinator");
}

function checked(answer: Answer): Answer {
  if (answer.status < 400) return answer;
  let problem: Record<string, unknown> = {};
  try {
    problem = json(answer);
  } catch {
    // the status says enough
  }
  throw new Declined(String(problem.detail || problem.title || `status ${answer.status}`), answer.status, String(problem.reason ?? ""));
}
