/** What `embrace bench browser` asks a page to do, one thing after the other. */
import type { Provider } from "../edge_runtime/runtime.ts";

export interface Load {
  readonly do: "load";
  readonly column: string;
  readonly threads: number;
  readonly provider: Provider;
}

export interface Open {
  readonly do: "open";
  readonly column: string;
  readonly bundle: string; // where its files are
  readonly boundary: string;
  readonly batch: number;
}

export interface Step {
  readonly do: "step";
  readonly column: string;
  readonly rate: number;
  readonly count: number; // in a row
}

export type WorkerOrder = Load | Open | Step;
export type Order = { readonly do: "look" } | { readonly do: "end" } | WorkerOrder;
export type Answer = Readonly<Record<string, unknown>>;
