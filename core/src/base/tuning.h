// Every number that chooses between ways of doing the same thing, with where it was measured, or that it was
// chosen. None of them changes a result. "2 cores" is a 2-core Emerald Rapids or EPYC virtual machine, a rank
// on each unless said otherwise; the programs that measure them are benchmarks/cpp/shm_roofline.cc and
// benchmarks/*.py.
//
// What is bounded by a promise (how soon an abort is noticed, when a peer counts as silent) stands where it
// is used.
#pragma once

#include <chrono>
#include <cstddef>

namespace hvd {

// -- inside a host: which way, by bytes of a fused batch (collectives/in_host.cc) --

// The payload of the arrival word's own cache line: a line less the word.
inline constexpr size_t kInlineNbytes = 48;
// One-shot is one step and the sum of everything by everybody; staged is two steps and a slice each. The
// slots of one-shot are lines that their owner writes and others only read, which is slow on some machines
// (AllreduceStaged). n=2 on 2 cores, one-shot against staged: 1.2 against 1.1 us at 4 KiB, 1.7 against 1.1 at
// 8 KiB, 3.2 against 1.5 at 16 KiB (shm_roofline ways 2).
inline constexpr size_t kOneShotNbytes = 4 << 10;
// With more ranks than CPUs a step is what costs. n=4 on 2 cores: 7.2 against 11.7 us at 4 KiB, 12.9 against
// 13.8 at 16 KiB (shm_roofline ways 4).
inline constexpr size_t kOneShotCrowdedNbytes = 16 << 10;
// Staging: what is copied in is added and copied out while it is in L2. The default of HVD_CHUNK_BYTES
// (ADR 0014: 4 MiB in chunks of 64, 128, 256 and 512 KiB take 258, 196, 190 and 182 us).
inline constexpr size_t kStagingNbytes = 256 << 10;
// In the arena nothing needs a pause but the look at the time: milliseconds of adding. n=2, in one race: 256
// KiB, 1, 4 and 64 MiB take 1.07, 1.02, 0.96 and 0.99 of the time of 16 at 4 MiB, 0.99 to 1.01 at 25 MiB and
// 0.96 to 0.99 at 100 MiB, all within the noise.
inline constexpr size_t kArenaPartNbytes = 16 << 20;
// With more ranks than CPUs, parts that whoever has a CPU takes (ADR 0020: better than a slice for each
// by 1.0 to 2.1 from 64 KiB to 16 MiB, n=4 on 2 cores; parts of 16 KiB are slower).
inline constexpr size_t kSharedPartNbytes = 64 << 10;

// -- fusion --

// Default of HVD_FUSION_BYTES; ADR 0013: ResNet-50's 161 gradients take 82 ms staged with 32 MiB and 116 with
// 8 MiB; more would keep an abort waiting for a batch.
inline constexpr size_t kFusionNbytes = 32 << 20;

// -- plans (scheduler/plan.cc) --

// Fused batches of a plan: the first is small, so that communication starts early. 1 MiB and then 1, 2, 4 or
// 8 (ADR 0019).
inline constexpr size_t kFirstBatchNbytes = 1 << 20;
inline constexpr size_t kBatchNbytes = 4 << 20;
// What a rank stages for others at a time: two batches, so that one is filled while others read the other
// one, and no more, so that it stays in the cache. n=2, 100 MiB a step in batches of 4, 32 MiB of L3: 4, 8,
// 32, 64 and 128 MiB take 0.76, 0.76, 1.17, 1.17 and 1.06 of the time of 16; with 0 to 2 ms before each
// tensor on each rank, as in a backward, 0.94, 0.90, 1.02, 1.04 and 1.02.
inline constexpr size_t kPlanWindowNbytes = 8 << 20;

// -- between hosts (collectives/cross_host.cc, collectives.cc) --

// Up to here everyone gets every rank's input and adds by itself: one way through the hosts instead of two.
// The second bounds what that gathers, since it grows with the ranks. Two namespaces, a rank in each:
// gathered takes 1.01, 1.02, 1.01, 0.87, 0.82, 0.93 and 0.90 of the time of the chain at 1, 4, 8, 16, 32, 64
// and 128 KiB. With more hosts, where it was not measured, each link carries more than the chain's.
inline constexpr size_t kSmallNbytes = 16 << 10;
inline constexpr size_t kSmallGatheredNbytes = 128 << 10;
// Chunks of a slice: as many as make filling and draining the pipeline a small part of the whole, but not so
// small that their system calls cost more than what their overlap saves, and not larger than what is added in
// L2 while the next one arrives. Two namespaces, 256 KiB: at least 64 KiB a chunk 278 us, 32 KiB 192, 16 KiB
// 269; at 1 MiB 16 chunks 464, 32 chunks 526 (contenders of benchmarks/tcp.py in one race).
inline constexpr size_t kChunksWanted = 16;
inline constexpr size_t kMinChunkNbytes = 32 << 10;
inline constexpr size_t kMaxChunkNbytes = 256 << 10;
// How long to look at the links, with a yield after each look, before poll(2): sleeping costs a wake-up of
// the CPU. A time and not a number of looks, since where ranks share CPUs one yield may take milliseconds.
// Two namespaces, a CPU for each rank, achieved / raw with 10 and with 200 looks: 0.97 and 1.43 at 64 KiB,
// 0.74 and 0.98 at 1 MiB, 1.0 and 1.35 at 4 MiB; 50, which take about this long, are as good as 200.
inline constexpr auto kLinkLookFor = std::chrono::microseconds(100);

// -- waiting for ranks of this host --

// Looks in a row, then yields, then sleep. Pure spinning with 4 ranks on 2 cores costs 24 to 32 ms a step,
// this 4 to 7 us (core.md §4). Without a CPU for each rank there is one look. The Scheduler's own thread
// gives way after as many yields: the program may be computing on its CPU.
inline constexpr int kSpins = 50;
inline constexpr int kYields = 10;

// -- who works when (scheduler/baton.cc) --

// A thread of the program that waits yields for so long before it sleeps: longer than a peer's lateness in a
// loop of blocking calls. 4 KiB, each rank up to 100 us late: 0, 20, 50, 500 and 2000 us
// take 1.82, 1.34, 1.15, 0.99 and 0.98 of the time of 150 with n=2, and 1.06, 1.02, 1.01, 0.97 and 0.96 with
// n=4 on 2 cores; nobody late: the same with n=2, and 1.71, 1.28, 1.01, 1.02 and 0.99 with n=4. More would
// cost the CPU of who computes. It looks at the links at every so-manieth yield, because that is a system
// call.
inline constexpr auto kYieldFor = std::chrono::microseconds(150);
inline constexpr int kYieldsPerPoll = 8;
// The Scheduler's thread lets a burst of submissions come in before it looks, so that they are announced and
// fused together, and so that a caller who waits right after submitting finds the baton free. Every nap costs
// the submitter a change of threads, so each is twice as long as the one before. A burst is what comes this
// fast (ADR 0013; gradients of a backward come slower).
inline constexpr auto kFirstNap = std::chrono::microseconds(50);
inline constexpr auto kLastNap = std::chrono::microseconds(1600);
inline constexpr auto kBurstEvery = std::chrono::microseconds(20);

}  // namespace hvd
