/**
 * Control variates: g ← g + (c − c_i), the local step of SCAFFOLD (exchanged) and of VRL-SGD (own).
 *
 * A device keeps c_i (`control`; of VRL-SGD the difference itself), c_i as the server has summed it (`reported`), and
 * for VRL-SGD the local model that went into the mean (`last`).
 */
import type { DeviceTask, Handover, LocalModel, LocalResult, Vectors } from "../device_task.ts";
import type { Vector } from "../space.ts";
import { LocalRule, minus, Running, type Start } from "./rule.ts";

const { fround } = Math;
const CONTROL = "control";
const REPORTED = "reported";
const LAST = "last";

export class ControlVariate extends LocalRule {
  constructor(readonly origin: "exchanged" | "own") {
    super();
  }

  begin(start: Start): Running {
    const control = start.brought[CONTROL];
    return control === undefined ? new Running() : new Correcting(control);
  }

  /** c − c_i. */
  override async beginTask(task: DeviceTask, model: LocalModel): Promise<Vectors> {
    if (this.origin === "own") return grown(task, model);
    const common = await task.server.state(CONTROL, task.everything);
    return { [CONTROL]: task.own ? minus(common, task.own.vectors[CONTROL]!) : common };
  }

  override finishTask(task: DeviceTask, result: LocalResult): Handover {
    if (this.origin === "exchanged") return optionTwo(task, result);
    const kept = result.brought[CONTROL] ?? new Float32Array(result.x.length);
    return { kept: { [CONTROL]: kept, [LAST]: result.x.slice() } };
  }
}

/** c_i on the weights that are trained, and its change since the server has summed it. */
function optionTwo(task: DeviceTask, result: LocalResult): Handover {
  const { parameters, reference } = result.model;
  const moved = minus(result.update, minus(parameters, reference));
  const next = task.own?.vectors[CONTROL]!.slice() ?? new Float32Array(moved.length);
  const reported = task.own?.vectors[REPORTED]!.slice() ?? new Float32Array(moved.length);
  const weights = task.trained.only("weight").inside(task.graph);
  const rates = fround(result.rates);
  const control = result.brought[CONTROL]!;
  const fresh = moved.map((distance, at) => -control[at]! - fround(distance / rates));
  weights.scatter(weights.gather(fresh), next);
  const change = minus(next, reported);
  result.sent.scatter(result.sent.gather(next), reported);
  return { tracks: { [CONTROL]: change }, kept: { [CONTROL]: next, [REPORTED]: reported } };
}

/** VRL-SGD: the correction grows by how far the device's last model was from the mean that came of it. */
function grown(task: DeviceTask, model: LocalModel): Vectors {
  const { own } = task;
  if (own === undefined) return {};
  const correction = own.vectors[CONTROL]!.slice();
  const last = own.vectors[LAST]!;
  if (task.wasThere) {
    task.units.forEach((unit, place) => {
      const walked = own.walked[place]!;
      if (task.exchange.changed[place] !== task.round || !walked) return;
      const weights = unit.and(task.trained).only("weight").inside(task.graph);
      const now = weights.gather(model.parameters);
      const before = weights.gather(last);
      const known = weights.gather(correction);
      const rates = fround(walked);
      const next = known.map((value, at) => value + fround(fround(before[at]! - now[at]!) / rates));
      weights.scatter(next, correction);
    });
  }
  return { [CONTROL]: correction };
}

class Correcting extends Running {
  constructor(private readonly control: Vector) {
    super();
  }

  override direct(start: number, stop: number, g: Vector, _x: Vector): void {
    for (let i = start; i < stop; i++) g[i] = g[i]! + this.control[i]!;
  }
}
