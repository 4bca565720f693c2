/**
 * Into which units a model is divided: a round synchronises those that are due, and a device keeps the others.
 *
 * When a unit is due is the coordinator's to know; a device needs the units alone (federation/axes/sync).
 */
import { Field } from "./decode.ts";
import { InputError } from "./errors.ts";
import { parameterLayers } from "./parameter_layers.ts";
import { channelPart, ofLayers, ofParameters, Region, whole, type Piece } from "./region.ts";
import type { ParameterSpace } from "./space.ts";

export interface Sync {
  readonly skipsRounds?: boolean; // a round may synchronise nothing: then even the only unit is kept
  units(space: ParameterSpace): readonly Region[];
}

/** Read the rule of a task. */
export function syncOf(field: Field): Sync {
  const rule = field.table(["rule", "parts", "by", "redistribute", "factor", "accelerate", "part"]);
  switch (rule("rule").or("all", (f) => f.text())) {
    case "all":
      return { units: (space) => [whole(space)] };
    case "fedlama": // a unit is a parameter layer
      return {
        units: (space) => parameterLayers(space).map((names) => ofParameters(space, names)),
        skipsRounds: rule("factor").or(2, (f) => f.integer(1, 1000)) > 1,
      };
    case "rotating":
      return rotating(
        rule("parts").or(4, (f) => f.integer(1, 10_000)),
        rule("by").or("layer", (f) => f.oneOf(["layer", "channel"])),
      );
    case "one_part":
      return onePart(rule("part").or("second_half", (f) => f.text()));
    default:
      throw new InputError(`sync: this agent does not know the rule ${rule("rule").text()}; reload the page`);
  }
}

/** Take some units together: all of them, one, or several that have no parameter in common. */
export function unitsRegion(sync: Sync, space: ParameterSpace, units: readonly number[]): Region {
  const regions = sync.units(space);
  if (units.length === regions.length) return whole(space);
  const found = new Map<string, Piece>();
  for (const piece of units.flatMap((unit) => regions[unit]!.layers.flat())) {
    if (found.has(piece.parameter.name)) throw new InputError(`units ${units} have ${piece.parameter.name} in common`);
    found.set(piece.parameter.name, piece);
  }
  return new Region(space.layers.map((layer) => layer.flatMap(({ name }) => found.get(name) ?? [])));
}

function rotating(parts: number, by: "layer" | "channel"): Sync {
  const numbers = [...Array(parts).keys()];
  if (by === "channel") return { units: (space) => numbers.map((part) => channelPart(space, part, parts)) };
  return { units: (space) => even(space, parts).map((layers) => ofLayers(space, (layer) => layers.includes(layer))) };
}

function onePart(part: string): Sync {
  return {
    units(space) {
      const half = Math.floor(space.layers.length / 2);
      const first = ofLayers(space, (layer) => layer < half);
      const second = ofLayers(space, (layer) => layer >= half);
      switch (part) {
        case "none":
          return [ofLayers(space, () => false), whole(space)];
        case "half_of_channels":
          return [channelPart(space, 0, 2), channelPart(space, 1, 2)];
        case "first_half":
          return [first, second];
        case "second_half":
          return [second, first];
        default:
          throw new InputError(`sync.part: this agent does not know '${part}'; reload the page`);
      }
    },
  };
}

/** Put consecutive layers into so many groups of about the same number of elements, none of them empty. */
function even(space: ParameterSpace, parts: number): number[][] {
  const sizeOf = (index: number): number => space.layer(index).stop - space.layer(index).start;
  const filled = [...space.layers.keys()].filter((index) => sizeOf(index) > 0);
  if (parts > filled.length) throw new InputError(`sync.parts: expected at most ${filled.length}, got ${parts}`);
  const total = filled.reduce((sum, index) => sum + sizeOf(index), 0);
  const groups: number[][] = [[]];
  let end = 0;
  filled.forEach((index, place) => {
    groups.at(-1)!.push(index);
    end += sizeOf(index);
    const left = filled.length - place - 1;
    const open = parts - groups.length;
    // The next group begins when this one has its share, and in time for every group to get a layer.
    if (open > 0 && (left === open || end * parts >= total * groups.length)) groups.push([]);
  });
  return groups;
}
