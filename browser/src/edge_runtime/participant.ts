/** A device's part in a round, around the training: what it starts from, what it sends, what it keeps. */
import { DeviceTask, OWN_MODEL, REFERENCE, type Kept, type LocalModel, type LocalResult, type ServerValues, type Vectors } from "../federation/device_task.ts";
import type { Manifest } from "../federation/manifest.ts";
import type { Task } from "../federation/messages.ts";
import type { Region } from "../federation/region.ts";
import { unitsRegion } from "../federation/sync.ts";
import type { Vector } from "../federation/space.ts";
import { MODEL } from "../federation/wire.ts";
import type { Outcome, Received } from "./trainer.ts";

/** A task that is ready to be trained. */
export interface Begun {
  readonly task: Task;
  readonly device: DeviceTask;
  readonly received: Received;
}

/** What a device sends: for every track a region and its values; and what it keeps. */
export interface Contribution {
  readonly tracks: ReadonlyMap<string, readonly [Region, Vector]>;
  readonly kept: Vectors;
  readonly walked: readonly number[];
  readonly steps: number; // that the device has taken with what it keeps
}

/** Collect everything that training starts from; `load` finds what was kept of a task. */
export async function begin(task: Task, manifest: Manifest, server: ServerValues, load: (task: string) => Promise<Kept | undefined>): Promise<Begun> {
  const last = task.exchange.lastTask;
  const kept = last === undefined ? undefined : await load(last);
  const fits = kept?.boundary === task.boundary && kept.walked.length === task.exchange.changed.length;
  const own = fits ? kept : undefined;
  const device = new DeviceTask(task.round, task.boundary, task.exchange, manifest, server, own);
  const model = await startOf(device);
  const brought: Record<string, Vector> = {};
  for (const rule of task.rules) Object.assign(brought, await rule.beginTask(device, model));
  const received = { parameters: model.parameters, brought, reference: model.reference, stepsBefore: own?.steps ?? 0 };
  return { task, device, received };
}

/** Collect what to send and what to keep; the vectors are good until the trainer's next task. */
export function finish({ task, device, received }: Begun, { local }: Outcome): Contribution {
  const { exchange } = task;
  const update = local.update();
  const model: LocalModel = { parameters: received.parameters, reference: received.reference };
  const sent = unitsRegion(exchange.sync, device.manifest.space, exchange.sent).and(device.trained);
  const inside = sent.inside(device.graph);
  const result: LocalResult = { model, brought: received.brought, x: local.x, update, rates: local.rates, state: local.state(), sent: inside };
  const tracks: Record<string, Vector> = {};
  const kept: Record<string, Vector> = exchange.keepsModel ? { [OWN_MODEL]: local.x.slice(), [REFERENCE]: model.reference } : {};
  for (const rule of task.rules) {
    const handed = rule.finishTask(device, result);
    Object.assign(tracks, handed.tracks);
    Object.assign(kept, handed.kept);
  }
  const names = Object.keys(tracks).sort();
  const sending = [[MODEL, update] as const, ...names.map((name) => [name, tracks[name]!] as const)];
  return {
    tracks: new Map(sending.map(([name, vector]) => [name, [sent, inside.gather(vector)]])),
    kept,
    walked: walkedUntilNow(device).map((walked) => walked + local.rates),
    steps: received.stepsBefore + local.steps,
  };
}

/** Where the device starts: at its own model, at one that it takes over, or at the server's. */
async function startOf(device: DeviceTask): Promise<LocalModel> {
  if (device.goesOn(OWN_MODEL)) {
    const values: Vector[] = [];
    for (const part of device.fresh) values.push(await device.server.model(part));
    return { parameters: device.renewed(OWN_MODEL, values), reference: device.renewed(REFERENCE, values) };
  }
  const received = await device.server.model(device.everything);
  return { parameters: device.exchange.inherit ? await takenOver(device, received) : received, reference: received };
}

/** Take over another device's model, as far as both train it and it was not averaged when the window ended. */
async function takenOver(device: DeviceTask, received: Vector): Promise<Vector> {
  const [theirs, moved] = await device.server.inherited();
  const parameters = received.slice();
  device.units.forEach((unit, place) => {
    const common = unit.and(device.trained).and(theirs);
    if (device.exchange.changed[place]! >= device.round || common.size === 0) return;
    const inside = common.inside(device.graph);
    const difference = common.inside(theirs).gather(moved);
    inside.scatter(inside.gather(parameters).map((value, at) => value + difference[at]!), parameters);
  });
  return parameters;
}

/** How far the device has gone with what it has of each unit, until this task. */
function walkedUntilNow(device: DeviceTask): number[] {
  const { exchange, own } = device;
  const known = own && device.goesOn(OWN_MODEL) ? own.walked : exchange.changed.map(() => 0);
  const replaced = new Set(exchange.replaced);
  return known.map((walked, unit) => (replaced.has(unit) ? 0 : walked));
}
