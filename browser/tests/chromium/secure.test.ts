/** A page in the private network: with the coordinator's own certificate it trains, without https it says what to do. */
import { createHash, X509Certificate } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { afterEach, beforeEach, expect, test } from "vitest";

import { Coordinator, digitsJob, FLAGS, helped, joinWith, until, Workshop, writeSamples } from "./fleet.ts";

let workshop: Workshop;

beforeEach(() => {
  workshop = new Workshop();
});

afterEach(async () => {
  await workshop.close();
  workshop.check();
});

test("a browser that trusts the certificate of --tls auto trains over it, with threads", async () => {
  const coordinator = await Coordinator.start(workshop, "browser", "--tls", "auto");
  expect(coordinator.url).toMatch(/^https:/);
  expect(coordinator.process.told()).toContain(coordinator.link); // for the QR code as well
  const tls = join(coordinator.folder, "tls");
  const stranger = await (await workshop.open()).newPage();
  await expect(stranger.goto(coordinator.link)).rejects.toThrow("ERR_CERT_AUTHORITY_INVALID");
  workshop.requests.length = 0;

  await coordinator.job(digitsJob(), "--certificate", join(tls, "authority.pem"));
  const { publicKey } = new X509Certificate(readFileSync(join(tls, "server.pem"), "utf8").replace(/[^]*END PRIVATE KEY-----\n/, ""));
  const digest = createHash("sha256").update(publicKey.export({ type: "spki", format: "der" })).digest("base64");
  const page = await (await workshop.open([...FLAGS, `--ignore-certificate-errors-spki-list=${digest}`])).newPage();
  await joinWith(page, coordinator.link, writeSamples(workshop.folder, "a.npz", 40, 1), "phone");
  await until(async () => (await helped(page)) >= 1, () => coordinator.process.told());
  expect(await page.evaluate(() => [isSecureContext, crossOriginIsolated])).toEqual([true, true]);
});

test("a page without https says what to do, and sends nothing", async () => {
  const coordinator = await Coordinator.start(workshop, "browser");
  const { port } = new URL(coordinator.url);
  workshop.origins.add(`http://lab.test:${port}`);
  const page = await (await workshop.open()).newPage();
  await page.goto(`http://lab.test:${port}/join#${coordinator.enrolment}`);
  await page.getByRole("heading", { name: "This page needs https" }).waitFor();
  await page.getByText("--tls auto").waitFor();
  expect(workshop.requests.filter((url) => url.includes("/v1/"))).toEqual([]);
  const other = workshop.problems.filter((each) => !each.includes("origin was untrustworthy")); // as it is
  workshop.problems.splice(0, Infinity, ...other);
});
