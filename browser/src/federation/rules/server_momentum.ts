/**
 * DOMO: the server's momentum m_r takes part in the local steps, but not in what the device reports.
 *
 *     before        x ← x − η·β·P·m_r once, before the first of P steps (DOMO)
 *     every_step    g ← g + β·m_r in every step, behind the local momentum (DOMO-S)
 *
 * The server's last move says what m_r is: (x_before − x)/(αηP). A device keeps the server's values (`received`).
 */
import { OWN_MODEL, REFERENCE, type DeviceTask, type Handover, type LocalModel, type LocalResult, type Vectors } from "../device_task.ts";
import type { Vector } from "../space.ts";
import { LocalRule, minus, Running, type Start } from "./rule.ts";

const { fround } = Math;
const SERVER_MOMENTUM = "server_momentum";
const RECEIVED = "received";

export class ServerMomentum extends LocalRule {
  constructor(
    readonly beta: number,
    readonly when: "before" | "every_step",
  ) {
    super();
  }

  begin(start: Start): Running {
    const momentum = start.brought[SERVER_MOMENTUM];
    if (momentum === undefined || !this.beta) return new Running();
    if (this.when === "every_step") return new EveryStep(this.beta, momentum);
    const before = new Before(start.rate * this.beta * start.steps, momentum);
    const moved = before.unreported();
    for (let i = 0; i < moved.length; i++) start.x[i] = start.x[i]! + moved[i]!;
    return before;
  }

  /** What the server's last step says about its momentum, where it has just moved. */
  override async beginTask(task: DeviceTask, model: LocalModel): Promise<Vectors> {
    const { fuse } = task.exchange;
    if (fuse === undefined) return {};
    const scale = fround(fuse);
    const momentum = new Float32Array(model.reference.length);
    const known = task.wasThere ? task.own?.vectors[RECEIVED] : undefined;
    for (const part of task.fresh) {
      const inside = part.region.inside(task.graph);
      const before = known === undefined ? await task.server.before(part) : inside.gather(known);
      const now = inside.gather(model.reference);
      inside.scatter(
        before.map((value, at) => fround(value - now[at]!) * scale),
        momentum,
      );
    }
    return { [SERVER_MOMENTUM]: momentum };
  }

  override finishTask(task: DeviceTask, result: LocalResult): Handover {
    const kept: Record<string, Vector> = this.beta > 0 ? serverValues(task, result.model.reference) : {};
    if (task.exchange.keepsModel && task.exchange.fuse !== undefined) {
      kept[REFERENCE] = minus(result.x, result.update); // which has moved with the server's part
    }
    return { kept };
  }
}

/** The server's values of this version as far as the device has them, whatever it goes on with itself. */
function serverValues(task: DeviceTask, reference: Vector): Record<string, Vector> {
  if (!task.goesOn(OWN_MODEL)) return { [RECEIVED]: reference };
  if (!task.goesOn(RECEIVED)) return {};
  const newer = task.fresh.map((part) => part.region.inside(task.graph).gather(reference));
  return { [RECEIVED]: task.renewed(RECEIVED, newer) };
}

class Before extends Running {
  constructor(
    private readonly factor: number,
    private readonly momentum: Vector,
  ) {
    super();
  }

  override unreported(_rates = 0): Vector {
    return scaled(this.momentum, -this.factor);
  }
}

class EveryStep extends Running {
  private readonly beta: number;

  constructor(
    private readonly exact: number,
    private readonly momentum: Vector,
  ) {
    super();
    this.beta = fround(exact);
  }

  override direct(start: number, stop: number, g: Vector, _x: Vector): void {
    for (let i = start; i < stop; i++) g[i] = g[i]! + fround(this.momentum[i]! * this.beta);
  }

  override unreported(rates: number): Vector {
    return scaled(this.momentum, -rates * this.exact);
  }
}

function scaled(vector: Vector, factor: number): Vector {
  const single = fround(factor);
  return vector.map((value) => value * single);
}
