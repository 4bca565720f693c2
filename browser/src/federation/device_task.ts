/** A device's side of a task: what it kept, what the server has, and what of that is newer. */
import { coverage, Coverage } from "./coverage.ts";
import { graphRegion, trainedRegion, type Exchange } from "./exchange.ts";
import type { Manifest } from "./manifest.ts";
import { ofLayers, type Region } from "./region.ts";
import type { Vector } from "./space.ts";

export const OWN_MODEL = "model"; // what a device keeps of the model itself
export const REFERENCE = "reference";

export type Vectors = Readonly<Record<string, Vector>>;

/** What a device asks the server for: everything that a boundary's graph works on, or one unit. */
export interface Part {
  readonly region: Region;
  readonly boundary: string;
  readonly unit?: number;
}

/** The server's vectors, as a device asks for them. */
export interface ServerValues {
  /** Fetch the version of the task. */
  model(part: Part): Promise<Vector>;
  /** Fetch the version before. */
  before(part: Part): Promise<Vector>;
  /** Fetch a vector of the server's state. */
  state(name: string, part: Part): Promise<Vector>;
  /** Fetch what the device that had this place before the window sent of the model. */
  inherited(): Promise<readonly [Region, Vector]>;
}

/** What a device keeps of a task. */
export interface Kept {
  readonly task: string;
  readonly boundary: string;
  readonly vectors: Vectors;
  readonly walked: readonly number[]; // of every unit: the sum of the rates of its steps since it was synchronised
  readonly steps: number; // that the device has taken with what it keeps
}

/** A task as the device meets it. `own` is what it kept of its last task, if it still has that. */
export class DeviceTask {
  readonly covered: Coverage;
  readonly graph: Region; // what the training graph works on
  readonly trained: Region; // what the device changes
  readonly units: readonly Region[]; // that are synchronised together
  readonly fresh: readonly Part[]; // what the server has newer, and what the device does not train

  constructor(
    readonly round: number,
    readonly boundary: string,
    readonly exchange: Exchange,
    readonly manifest: Manifest,
    readonly server: ServerValues,
    readonly own: Kept | undefined,
  ) {
    this.covered = coverage(manifest, boundary);
    this.graph = graphRegion(manifest, this.covered);
    this.trained = trainedRegion(manifest, this.covered);
    this.units = exchange.sync.units(manifest.space);
    this.fresh = this.freshParts();
  }

  /** Whether the device kept something once, and it is gone. */
  get lost(): boolean {
    return this.exchange.lastTask !== undefined && this.own === undefined;
  }

  /** Whether the device took part in the round before. */
  get wasThere(): boolean {
    return this.exchange.lastRound === this.round - 1;
  }

  get everything(): Part {
    return { region: this.graph, boundary: this.boundary };
  }

  /** Whether the device goes on with its own vector of a name, but for what is fresh. */
  goesOn(name: string): boolean {
    return this.exchange.keepsModel && this.stays && this.own!.vectors[name] !== undefined;
  }

  /** Copy a vector that was kept, with the values of what is fresh, part by part. */
  renewed(name: string, values: readonly Vector[]): Vector {
    const found = this.own!.vectors[name]!.slice();
    this.fresh.forEach((part, place) => part.region.inside(this.graph).scatter(values[place]!, found));
    return found;
  }

  /** Whether the device has something of its own from this window. */
  private get stays(): boolean {
    const last = this.exchange.lastRound;
    return this.own !== undefined && last !== undefined && last >= this.exchange.windowFrom;
  }

  private freshParts(): readonly Part[] {
    if (!this.exchange.keepsModel || !this.stays) return [this.everything];
    const untrained = ofLayers(this.manifest.space, (layer) => !this.covered.trains(layer)).and(this.graph);
    const replaced = this.exchange.replaced.map((unit) => ({
      region: this.units[unit]!.and(this.trained),
      boundary: this.boundary,
      unit,
    }));
    return [{ region: untrained, boundary: this.boundary }, ...replaced].filter((part) => part.region.size > 0);
  }
}

/** Where a device starts, and the server's value that its update is the difference from. */
export interface LocalModel {
  readonly parameters: Vector;
  readonly reference: Vector;
}

/** A task after its last step. */
export interface LocalResult {
  readonly model: LocalModel;
  readonly brought: Vectors; // what the rules began with, by name
  readonly x: Vector; // where the device is now
  readonly update: Vector; // what it reports: how far that is from the reference
  readonly rates: number; // sum over the steps
  readonly state: Vectors; // buffers of the rules at work, by name
  readonly sent: Region; // what is sent, as a part of the graph's vector
}

/** What a rule hands over at the end of a task: tracks to the server, vectors to the device's next task. */
export interface Handover {
  readonly tracks?: Vectors;
  readonly kept?: Vectors;
}
