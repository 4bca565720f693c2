/** What of the model goes to and fro in a task, and what the device keeps: federation/exchange.py. */
import type { Coverage } from "./coverage.ts";
import type { Field } from "./decode.ts";
import { InputError } from "./errors.ts";
import type { Manifest } from "./manifest.ts";
import { box, ofLayers, type Region } from "./region.ts";
import { syncOf, type Sync } from "./sync.ts";

export class Exchange {
  constructor(
    readonly sync: Sync,
    readonly sent: readonly number[], // units
    readonly changed: readonly number[], // version in which each unit got its present value
    readonly windowFrom: number, // round since which the cohort is the same
    readonly lastRound: number | undefined, // in which this device last took part with success
    readonly lastTask: string | undefined, // ... and its task: what was kept then is valid
    readonly inherit: { readonly task: string; readonly boundary: string } | undefined,
    readonly tracks: readonly string[], // beside the model
    readonly fuse: number | undefined, // DOMO: 1/(αηP) of the round before
  ) {
    const known = sent.every((unit) => unit < changed.length) && new Set(sent).size === sent.length;
    if (changed.length === 0 || !known) throw new InputError(`exchange.sent: expected units, each once, got ${sent}`);
  }

  /** Units that the device does not have: all, if it was not in this window before. */
  get replaced(): number[] {
    const since = this.lastRound !== undefined && this.lastRound >= this.windowFrom ? this.lastRound : undefined;
    return [...this.changed.keys()].filter((unit) => since === undefined || this.changed[unit]! > since);
  }

  /** Whether the device has to keep weights of its own. */
  get keepsModel(): boolean {
    return this.changed.length > 1 || this.sync.skipsRounds === true;
  }
}

const FIELDS = "sync sent changed window_from last_round last_task inherit tracks fuse".split(" ");

export function exchangeOf(field: Field): Exchange {
  const get = field.table(FIELDS);
  return new Exchange(
    syncOf(get("sync")),
    get("sent").or([0], (f) => f.list((unit) => unit.integer())),
    get("changed").or([0], (f) => f.list((version) => version.integer())),
    get("window_from").or(0, (f) => f.integer()),
    get("last_round").optional((f) => f.integer()),
    get("last_task").optional((f) => f.text()),
    get("inherit").optional((f) => {
      const inherit = f.table(["task", "boundary"]);
      return { task: inherit("task").text(), boundary: inherit("boundary").text() };
    }),
    get("tracks").or([], (f) => f.list((name) => name.text())),
    get("fuse").optional((f) => f.number()),
  );
}

/** What the training graph of a coverage works on. */
export function graphRegion(manifest: Manifest, covered: Coverage): Region {
  const { narrow, layer: first } = covered.boundary;
  return narrow !== undefined ? box(manifest.space, narrow) : ofLayers(manifest.space, (layer) => layer >= first);
}

/** What a device with this coverage changes. */
export function trainedRegion(manifest: Manifest, covered: Coverage): Region {
  return graphRegion(manifest, covered).and(ofLayers(manifest.space, (layer) => covered.trains(layer)));
}
