/** A device that is told to come back: its own bounds, whatever the coordinator says. */
import { afterEach, expect, test, vi } from "vitest";

import { DeviceClient } from "../src/edge_runtime/client.ts";

afterEach(() => void vi.unstubAllGlobals());

test.each([
  ["90", 90],
  ["0", 2],
  ["999999999", 4 * 3600],
  ["-5", undefined],
  ["1e9", undefined],
  ["Wed, 18 Nov 2026 07:28:00 GMT", undefined],
  [null, undefined],
])("Retry-After: %s", async (told, seconds) => {
  const headers: Record<string, string> = told === null ? {} : { "Retry-After": told };
  vi.stubGlobal("fetch", async () => new Response(null, { status: 204, headers }));
  const client = new DeviceClient("http://coordinator", "token");
  expect(await client.nextTask(0)).toBeUndefined();
  expect(client.comeBack).toBe(seconds);
});
