/** What the coordinator says to the administrator's page. The session is a cookie that this code never sees. */

export interface Job {
  readonly id: string;
  readonly name: string;
  readonly bundle: string;
  readonly state: string;
  readonly version: number;
  readonly message: string;
  readonly created_at: number;
  readonly plan: Plan;
  readonly unfit: Readonly<Record<string, string>>;
  readonly benched: Readonly<Record<string, string>>;
  readonly waiting: { readonly on: string; readonly text: string; readonly count: number } | null;
  readonly best: { readonly version: number; readonly metric: string; readonly value: number } | null;
  readonly round: { readonly number: number; readonly state: string; readonly opened_at: number; readonly body: RoundBody } | null;
}

export interface RoundBody {
  readonly wanted?: number;
  readonly quorum?: number;
  readonly deadline?: number | null;
}

export interface Plan {
  readonly num_rounds: number;
  readonly algorithm: string;
  readonly [key: string]: unknown;
}

export interface Round {
  readonly number: number;
  readonly state: string;
  readonly opened_at: number;
  readonly closed_at: number | null;
  readonly summary: {
    readonly updates?: number;
    readonly samples?: number;
    readonly bytes_up?: number;
    readonly loss?: number | null;
    readonly trainers?: Readonly<Record<string, number>>;
  };
}

export interface Metric {
  readonly version: number;
  readonly name: string;
  readonly value: number;
}

export interface Device {
  readonly id: string;
  readonly name: string;
  readonly revoked: boolean;
  readonly state: string;
  readonly profile: { readonly memory?: number | null; readonly tier?: string | null; readonly threads?: number; readonly runtime?: string; readonly engines?: readonly string[] };
  readonly enrolled_at: number;
  readonly seen_at: number;
  readonly benched_until: number | null;
  readonly unfit: string;
  readonly seconds: Readonly<Record<string, number>>;
}

export interface FleetDevice extends Device {
  readonly last_job: string;
  readonly last_update_at: number | null;
  readonly boundary: string;
  readonly engine: string;
  readonly memory: { readonly anonymous?: number; readonly process?: number; readonly allowed?: number };
  readonly done: number;
  readonly failed: number;
  readonly in_a_row: number;
  readonly reason: string;
  readonly message: string;
}

export interface Fleet {
  readonly devices: readonly FleetDevice[];
  readonly total: number;
}

export interface DeviceReport extends Device {
  readonly tasks_done: number;
  readonly tasks_failed: number;
  readonly last_error: { readonly job: string; readonly at: number; readonly reason: string; readonly message: string } | null;
  readonly last_update_at: number | null;
  readonly jobs: readonly {
    readonly job: string;
    readonly name: string;
    readonly boundary: string;
    readonly task: string;
    readonly done: number;
    readonly failed: number;
    readonly benched_until: number | null;
    readonly reason: string;
    readonly message: string;
  }[];
}

export interface Seat {
  readonly round: number;
  readonly slot: number;
  readonly device: string;
  readonly boundary: string;
  readonly state: string;
  readonly since: number;
  readonly until: number;
  readonly seconds: number | null;
  readonly usual: number | null;
  readonly lost: readonly string[];
}

export interface Seats {
  readonly layers: readonly { readonly name: string; readonly parameters: number }[];
  readonly boundaries: Readonly<Record<string, readonly number[]>>;
  readonly tiers: Readonly<Record<string, string>>;
  readonly devices: Readonly<Record<string, string>>;
  readonly seats: readonly Seat[];
}

export interface Version {
  readonly version: number;
  readonly bytes: number;
  readonly scores: Readonly<Record<string, number>>;
  readonly newest: boolean;
  readonly best: boolean;
}

export interface Choices {
  readonly bundles: readonly {
    readonly digest: string;
    readonly name: string;
    readonly layers: number;
    readonly parameters: number;
    readonly bytes: number;
    readonly batch: number;
    readonly tiers: Readonly<Record<string, string>>;
  }[];
  readonly evaluation_data: readonly { readonly sha256: string; readonly bytes: number }[];
  readonly algorithms: readonly { readonly name: string; readonly note: string; readonly paper: string }[];
}

/** An answer that is no. */
export class Refusal extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

let ahead = 0; // milliseconds by which the coordinator's clock is before this one's

/** The coordinator's time, in seconds since 1970. */
export const clock = (): number => (Date.now() + ahead) / 1000;

let signedOut: () => void = () => undefined;

/** Say what to do when the coordinator no longer knows this page. */
export function onSignedOut(react: () => void): void {
  signedOut = react;
}

export async function ask<T>(path: string, method = "GET", body?: unknown, headers: Readonly<Record<string, string>> = {}): Promise<T> {
  const binary = body instanceof Blob;
  const own = { "Embrace-Request": "dashboard", ...(body === undefined || binary ? {} : { "Content-Type": "application/json" }), ...headers };
  const content = body === undefined ? {} : { body: binary ? body : JSON.stringify(body) };
  let answer: Response;
  try {
    answer = await fetch(path, { method, headers: own, cache: "no-store", ...content });
  } catch {
    throw new Refusal(0, "The coordinator cannot be reached.");
  }
  const told = Date.parse(answer.headers.get("date") ?? "") - Date.now();
  if (Math.abs(told - ahead) > 2000) ahead = told; // the header has whole seconds
  if (!answer.ok) {
    const problem = (await answer.json().catch(() => ({}))) as { detail?: string; title?: string };
    if (answer.status === 401 && headers.Authorization === undefined) signedOut();
    throw new Refusal(answer.status, problem.detail || problem.title || `The coordinator answered ${answer.status}.`);
  }
  return (answer.status === 204 ? undefined : await answer.json()) as T;
}

export const signIn = (token: string): Promise<unknown> => ask("/v1/session", "POST", undefined, { Authorization: `Bearer ${token}` });
export const signOut = (): Promise<unknown> => ask("/v1/session", "DELETE");
