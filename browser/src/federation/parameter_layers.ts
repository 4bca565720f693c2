/**
 * The layers that the papers count: a convolution, dense, recurrent or embedding layer with all that belongs to it.
 *
 * Names and shapes say which parameters of a piece belong together, as in federation/parameter_layers.py.
 */
import type { Parameter, ParameterSpace } from "./space.ts";

/** Divide a space into the names of the parameters of each layer, input side first. */
export function parameterLayers(space: ParameterSpace): ReadonlySet<string>[] {
  return space.layers.flatMap(divided);
}

function divided(parameters: readonly Parameter[]): ReadonlySet<string>[] {
  const leads = ({ kind, shape }: Parameter): boolean => kind === "weight" && shape.length > 1;
  const leading = new Set(parameters.filter(leads).map(({ name }) => moduleOf(name)));
  const modules = parameters.map(({ name }) => moduleOf(name));
  let leader = modules.find((module) => leading.has(module)) ?? modules[0];
  const leaderOf = new Map<string, string>();
  for (const module of modules) {
    if (leading.has(module)) leader = module;
    if (!leaderOf.has(module)) leaderOf.set(module, leader!);
  }
  const found = new Map<string, Set<string>>([...leaderOf.values()].map((module) => [module, new Set<string>()]));
  for (const { name } of parameters) found.get(leaderOf.get(moduleOf(name))!)!.add(name);
  return [...found.values()];
}

/** The name without its last part; a name of one part is a module of its own. */
function moduleOf(name: string): string {
  const end = Math.max(name.lastIndexOf("."), name.lastIndexOf("/"));
  return end > 0 ? name.slice(0, end) : name;
}
