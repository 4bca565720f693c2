/** The local rules by name; what a task names and this agent does not know is refused. */
import type { Field } from "../decode.ts";
import { InputError } from "../errors.ts";
import { Adam } from "./adam.ts";
import { ControlVariate } from "./control_variate.ts";
import { Momentum } from "./momentum.ts";
import { Proximal } from "./proximal.ts";
import type { LocalRule } from "./rule.ts";
import { ServerMomentum } from "./server_momentum.ts";
import { WeightDecay } from "./weight_decay.ts";

type Get = (key: string) => Field;

const MOMENTS = ["beta1", "beta2", "epsilon", "between"];

function adam(get: Get, decay = 0): Adam {
  return new Adam(
    get("beta1").or(0.9, (f) => f.number(0, 1)),
    get("beta2").or(0.999, (f) => f.number(0, 1)),
    get("epsilon").or(1e-8, (f) => f.number(1e-30, 1)),
    get("between").or("reset", (f) => f.oneOf(["reset", "keep"])),
    decay,
  );
}

const RULES: Readonly<Record<string, readonly [readonly string[], (get: Get) => LocalRule]>> = {
  adam: [MOMENTS, (get) => adam(get)],
  adamw: [[...MOMENTS, "decay"], (get) => adam(get, get("decay").or(0.01, (f) => f.number(0)))],
  control_variate: [["origin"], (get) => new ControlVariate(get("origin").or("exchanged", (f) => f.oneOf(["exchanged", "own"])))],
  momentum: [
    ["factor", "nesterov", "between"],
    (get) =>
      new Momentum(
        get("factor").number(0, 1),
        get("nesterov").or(false, (f) => f.flag()),
        get("between").or("reset", (f) => f.oneOf(["reset", "keep", "average"])),
      ),
  ],
  proximal: [["mu"], (get) => new Proximal(get("mu").number(0))],
  server_momentum: [
    ["beta", "when"],
    (get) => new ServerMomentum(get("beta").number(0), get("when").oneOf(["before", "every_step"])),
  ],
  weight_decay: [["factor"], (get) => new WeightDecay(get("factor").number(0))],
};

/** Read the chain of a task. */
export function rulesOf(field: Field): LocalRule[] {
  return field.list((item) => {
    const name = item.entries().find(([key]) => key === "rule")?.[1].text() ?? "";
    const known = Object.hasOwn(RULES, name) ? RULES[name] : undefined;
    if (known === undefined) throw new InputError(`task.rules: this agent does not know '${name}'; reload the page`);
    const [constants, make] = known;
    return make(item.table(["rule", ...constants]));
  });
}
