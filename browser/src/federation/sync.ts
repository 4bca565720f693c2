/**
 * Into which units a model is divided: a round synchronises those that are due, and a device keeps the others.
 *
 * When a unit is due is the coordinator's to know; a device needs the units alone (federation/axes/sync).
 */
import { Field } from "./decode.ts";
import { InputError } from "./errors.ts";
import { channelPart, ofLayers, Region, whole } from "./region.ts";
import type { ParameterSpace } from "./space.ts";

export interface Sync {
  units(space: ParameterSpace): readonly Region[];
}

/** Read the rule of a task. */
export function syncOf(field: Field): Sync {
  const rule = field.table(["rule", "parts", "by", "redistribute", "factor", "accelerate", "part"]);
  switch (rule("rule").or("all", (f) => f.text())) {
    case "all":
      return { units: (space) => [whole(space)] };
    case "fedlama": // a unit is a layer
      return { units: (space) => space.layers.map((_, index) => ofLayers(space, (layer) => layer === index)) };
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

/** Take some units together: all of them, one, or several that have no layer in common. */
export function unitsRegion(sync: Sync, space: ParameterSpace, units: readonly number[]): Region {
  const regions = sync.units(space);
  if (units.length === regions.length) return whole(space);
  return new Region(
    space.layers.map((_, index) => {
      const found = units.map((unit) => regions[unit]!.layers[index]!).filter((pieces) => pieces.length > 0);
      if (found.length > 1) throw new InputError(`units ${units} have layer ${index} in common`);
      return found[0] ?? [];
    }),
  );
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
