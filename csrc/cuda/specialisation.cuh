// One specialisation: the constants that -D fixes at compile time, and the layout of shared memory.
// `AttentionSpecialisation` in pagedkv/kernels/cuda/specialisation.py computes the same sizes.
//
//     Q_KIND K_KIND V_KIND   elements.cuh
//     HEAD_DIM HEAD_DIM_V    multiples of 16
//     WARPS_M                warps over query rows, 16 rows each, or 8
//     KEYS_AS_ROWS           1: a warp has 8 query rows, and keys are the rows of both products (fragments.cuh)
//     WARPS_N                teams of such warps, over keys
//     TILE                   keys that a team takes at a time
//     STAGES                 tiles of each team in shared memory
//     COPY                   bytes of one asynchronous copy: 16, 8, 4
//     TOKEN_SCALES           1: a scale per (token, head) is copied with the keys
//     BLOCKS                 CTAs that share an SM
//     WARPS_D                warps that share rows. Each multiplies its part of D and keeps its part of the result's
//                            columns, so that 512 columns fit into registers. 1 for most dims, 4 above 256
//     V_IN_K                 1: V is the first part of K in the same memory (MLA) and is read once
//     PAGE_RUNS              0: any pages. 1: every 16 keys of a tile lie in one page. 2: its rows also follow one
//                            another without gaps (stages.cuh)
//
//     shared memory   [ queries: terms x ROWS x Q_D ][ m, l of teams, of totals ][ of each row ][ votes ][ scores ]
//                     [ team 0: stage 0, 1, ... ][ team 1: ... ] ...
//     scores          sums over parts of D, exchanged by the WARPS_D warps. The team's barrier before the next tile
//                     separates these reads from the next writes
//     a stage         [ TILE rows of K ][ TILE rows of V ][ scales ][ bits: which keys are present, which are lost ]
// A row takes an odd number of times 16 bytes. Eight rows then begin in eight different groups of banks, so neither
// ldmatrix nor loads of quads conflict. K of int5 are two planes without gaps, [TILE, D / 2] and [TILE, D / 8]. After
// the last key, the memory of the stages holds the teams' states.
#pragma once

#include "elements.cuh"

using Elements = Operands<Q_KIND, K_KIND, V_KIND>;

constexpr int D = HEAD_DIM, DV = HEAD_DIM_V;
constexpr int D_PART = D / WARPS_D, DV_PART = DV / WARPS_D;
constexpr int TEAM_WARPS = WARPS_M * WARPS_D, TEAM_THREADS = 32 * TEAM_WARPS, THREADS = TEAM_THREADS * WARPS_N;
constexpr int WARP_ROWS = KEYS_AS_ROWS ? 8 : 16, ROWS = WARP_ROWS * WARPS_M, STEP_TOKENS = TILE * WARPS_N;
constexpr int MASKS = (TILE + 31) / 32;  // words with a bit for each key of a tile
constexpr int ENTRIES = PAGE_RUNS ? TILE / 16 : MASKS;  // entries of the page table that one lane looks up for a tile

constexpr bool ROTATED = V_KIND == CODE4;  // K, V, queries and results
constexpr int K_BITS = BITS_OF<K_KIND>, V_BITS = BITS_OF<V_KIND>;
constexpr int K_ROW = D * K_BITS / 8, V_ROW = DV * V_BITS / 8;
DEVICE constexpr int apart(int row) { return ((row + 15) / 16 | 1) * 16; }
constexpr int K_STRIDE = K_KIND == INT5 ? K_ROW : apart(K_ROW), V_STRIDE = V_IN_K ? K_STRIDE : apart(V_ROW);
constexpr int FIFTH_IN_STAGE = TILE * (D / 2);  // the second plane of int5
constexpr bool PADS = V_KIND == CODE4 && DV % 32;  // loads of codes reach past the row
constexpr int V_IN_STAGE = V_IN_K ? 0 : TILE * K_STRIDE, SCALES_IN_STAGE = TILE * (K_STRIDE + (V_IN_K ? 0 : V_STRIDE));
constexpr int PRESENT_IN_STAGE = SCALES_IN_STAGE + (TOKEN_SCALES ? 4 * TILE : 0);
constexpr int LOST_IN_STAGE = PRESENT_IN_STAGE + 8;  // bits: which values are not finite
constexpr int STAGE_BYTES = PRESENT_IN_STAGE + 16;

// The steps of 16 columns of Q K, of one warp. A lane takes 8 * WORDS columns of int5, and zeros past the last.
constexpr int WORDS = (D + 31) / 32, Q_STEPS = K_KIND == INT5 ? 2 * WORDS : D_PART / 16;
constexpr int Q_D = 16 * Q_STEPS * WARPS_D;
DEVICE constexpr int power_in(int x, int most) { return (x & -x) < most ? x & -x : most; }  // that divides x
constexpr int LOW_BYTES = power_in(4 * WORDS | D / 2, 16), FIFTH_BYTES = power_in(WORDS | D / 8, 4);  // of one load
using LowUnit = UnitOf<LOW_BYTES < 8 ? 4 : 8>::type;
using FifthUnit = UnitOf<FIFTH_BYTES>::type;
constexpr int Q_STRIDE = 2 * Q_D + 16, Q_TERM_BYTES = ROWS * Q_STRIDE;
constexpr int TEAM_STATS_AT = Elements::Q_TERMS * Q_TERM_BYTES;  // [WARPS_N][ROWS] of m, then of l
constexpr int TOTALS_AT = TEAM_STATS_AT + 8 * WARPS_N * ROWS;  // [ROWS] of m, then of l
constexpr int Q_INVERSES_AT = TOTALS_AT + 8 * ROWS;  // [ROWS]: the inverse of the power of two of each query row
constexpr int BIASES_AT = Q_INVERSES_AT + 4 * ROWS;  // ROTATED, [ROWS]: see load_rows
constexpr int STARTS_AT = BIASES_AT + 4 * ROWS;  // ROTATED, [ROWS]: what the scores begin at
constexpr int LAST_AT = Q_INVERSES_AT + 4 * ROWS * (ROTATED ? 3 : 1);
constexpr int LAUNCH_AT = LAST_AT + 8;
constexpr int VOTES_AT = LAST_AT + 16;  // [warps]: lanes whose result holds a NaN
constexpr int SCORES_AT = VOTES_AT + (THREADS / 8 + 15) / 16 * 16;
constexpr int SCORES_BYTES = WARPS_D > 1 ? 4 * WARPS_D * ROWS * TILE : 0;  // of a team
constexpr int STAGES_AT = (SCORES_AT + WARPS_N * SCORES_BYTES + 127) / 128 * 128;
constexpr int SUM_STRIDE = 4 * (DV + 8), SUM_BYTES = ROWS * SUM_STRIDE;
constexpr int STAGES_BYTES = STAGES * STAGE_BYTES;
constexpr int SHARED_BYTES = STAGES_AT + WARPS_N * (STAGES_BYTES > SUM_BYTES ? STAGES_BYTES : SUM_BYTES);

// Accumulators of a warp, four elements in each lane: of S, for 8 or 16 keys each, and of O, for as many columns. Lanes
// take columns of narrow values in fours, so 32 at a time.
constexpr int TILE_KEYS = KEYS_AS_ROWS ? 16 : 8, SCORE_TILES = TILE / TILE_KEYS;
constexpr int VALUE_TILES = (Elements::LDMATRIX ? DV_PART : (DV_PART + 31) / 32 * 32) / TILE_KEYS;
constexpr int QUERY_WORDS = KEYS_AS_ROWS ? 2 : 4;  // of a lane, for 16 columns of the warp's query rows
// In registers, where they fit.
constexpr bool KEEP_QUERIES = D_PART <= 128 && (TILE == 16 || KEYS_AS_ROWS) && Elements::Q_TERMS == 1;
// A decode reads each key once. Copies of narrow keys have no registers for the hint: 32 x 4k took an H200 2 % longer.
constexpr bool READ_ONCE = WARPS_M == 1 && V_BITS >= 16;
// Steps along D whose operands are loaded together.
constexpr int KEYS_AHEAD = KEEP_QUERIES || K_KIND == INT5 ? Q_STEPS : K_KIND == F32 ? 1 : 2;
// Steps of a thread that loads queries together. Asynchronous copies wait for nothing, so one is enough.
constexpr int QUERIES_AHEAD = Elements::Q_TERMS == 1 ? 1 : 4;
// Copies of a thread whose addresses are computed together. More of them spill registers on sm_120.
constexpr int COPIES_AHEAD = K_KIND == F32 ? 1 : 4;
// The same for runs of 16 keys: the most that spill no register, found by compiling for every architecture.
constexpr int WIDE_COPIES_AHEAD = V_BITS == 16 ? 4 : 2;
constexpr int RUN_COPIES_AHEAD = K_KIND == F32 ? 4 : D_PART > 128 ? WIDE_COPIES_AHEAD : 16;
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.69314718055994531f;

static_assert(D % (16 * WARPS_D) == 0 && DV % (16 * WARPS_D) == 0 && TILE % 16 == 0, "whole fragments");
static_assert((K_KIND != INT5 ? K_ROW : PAGE_RUNS ? 2 * D : D / 8) % COPY == 0 && V_ROW % COPY == 0, "whole copies");
static_assert(!ROTATED || (WARPS_D == 1 && TOKEN_SCALES && !V_IN_K), "a warp has whole rows of few columns");
static_assert(ROWS <= THREADS && STAGES >= 2 && TILE <= 64, "a thread for each row; one stage to read and one to fill");
