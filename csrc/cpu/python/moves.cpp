// From Python objects to a Write, to a Gather, to copies of frames and to two States that become one.
//
//     bind_write(k, v, k_scale, v_scale, calibration, cos, sin, interleaved)       returns a binding, or None
//     write(binding, k_new, v_new, slots, positions, is_checked)           `positions` is None if keys are not turned;
//                                                     returns None if a slot or a position is not there: then
//                                                     checks.slot_values has the words
//     copy(storage, copies, threads)                                       calls that Python has checked:
//     gather(k, v, k_scale, v_scale, calibration, block_table, rows, seq_lens, first, starts, k_out, v_out, isa,
//            threads)
//     merge(out_a, lse_a, out_b, lse_b, out, lse, isa, threads)            out and lse are contiguous
//     merge_at_once(out_a, lse_a, out_b, lse_b)       calls with the best kernel of this processor, without
//     copy_at_once(storage, copies)                   torch's dispatcher; None if the operator must serve or refuse
#include <algorithm>

#include "binding.hpp"
#include "isa/isas.hpp"
#include "moves/spread.hpp"
#include "schedule.hpp"

namespace pagedkv {
namespace {

constexpr int64_t STREAMED_BYTES = 8 << 20;  // results of a gather that bypass the caches

enum { K_NEW, V_NEW, SLOTS, POSITIONS, NUM_WRITE };  // the fields of WriteCall from k_new on

Write write_into(const Binding& b, int pool, int scale) {
    const Tensor& into = b.tensors[pool];
    bool is_value = pool == BOUND_V;
    Write w{};
    w.kv_type = stored_type(into, is_value), w.D = stored_dim(into, is_value);
    w.K = into.shape[2], w.S = into.shape[1], w.rotated = stored_type(b.tensors[BOUND_V], true) == Dtype::c4;
    if (!is_value) w.calibration = view_of(b.tensors[BOUND_CALIBRATION]);
    w.pool = view_of(into), w.scale = view_of(b.tensors[scale]), w.scale_per_token_head = b.tensors[scale].dims == 3;
    return w;
}

bool keeps_contract(const Binding& b, const Tensor* t) {
    Sizes sizes;
    sizes.of[OF_K] = b.write_k.K, sizes.of[OF_D] = b.write_k.D, sizes.of[OF_DV] = b.write_v.D;
    bool is_turned = b.tensors[BOUND_COS].is_given;
    return t[POSITIONS].is_given == is_turned && keeps_rules(WRITE, t, NUM_WRITE, b.tensors, b.tensors[BOUND_K], sizes);
}

// The rules of checks.slot_values for all that a kernel follows. O(tokens).
bool names_what_is_there(const Binding& b, const Tensor* t) {
    const Tensor &slots = t[SLOTS], &positions = t[POSITIONS];
    int64_t end = b.tensors[BOUND_K].shape[0] * b.write_k.S, angles = b.tensors[BOUND_COS].shape[0];
    for (int64_t i = 0; i < slots.shape[0]; i++) {
        int64_t slot = reinterpret_cast<const int64_t*>(slots.data)[i * slots.strides[0]];
        if (slot >= end) return false;
        if (slot < 0 || !positions.is_given) continue;
        int64_t position = reinterpret_cast<const int64_t*>(positions.data)[i * positions.strides[0]];
        if (position < 0 || position >= angles) return false;
    }
    return true;
}

void compute(const Binding& b, const Server& server, const Tensor* t) {
    Write writes[] = {b.write_k, b.write_v};
    for (int i : {K_NEW, V_NEW}) {
        writes[i].new_type = dtype_of(t[i]), writes[i].fresh = view_of(t[i]);
        writes[i].slots = t[SLOTS].data, writes[i].slots_stride = view_of(t[SLOTS]).stride[0];
    }
    writes[K_NEW].positions = view_of(t[POSITIONS]);
    int threads = threads_of(server);
    py::gil_scoped_release released;
    for (const Write& w : writes) run_write(*server.isa, w, t[K_NEW].shape[0], threads);
}

py::object write(PyObject* const* x) {
    Binding& b = binding_of(*x++);
    prefetch(b, x, NUM_WRITE);
    Tensor t[NUM_WRITE];
    bool is_checked = x[NUM_WRITE] == Py_True, is_read = is_checked || !is_observed(b, x[K_NEW], x[V_NEW]);
    for (int i = 0; i < NUM_WRITE; i++) is_read = is_read && read_tensor(x[i], t[i], is_checked);
    is_read = is_read && t[K_NEW].is_given && t[V_NEW].is_given && t[SLOTS].is_given;
    if (is_checked && !is_read) throw py::type_error("these are not the checked arguments of a write");
    if (!is_read || (!is_checked && !(is_unchanged(b) && keeps_contract(b, t)))) return py::none();
    if (t[SLOTS].device_type == CPU_DEVICE && !names_what_is_there(b, t)) return py::none();
    int64_t kind = int64_t{t[K_NEW].code} << 24 | t[K_NEW].bits << 16 | t[V_NEW].code << 8 | t[V_NEW].bits;
    Server server = b.server;  // a copy: another thread may set another kernel meanwhile
    if (!is_checked && server.kind != kind) return py::int_(kind);
    if (!server.serve) return compute(b, server, t), py::bool_(true);
    PyObject* none = PyObject_Vectorcall(server.serve.ptr(), x, NUM_WRITE, nullptr);
    if (!none) throw py::error_already_set();
    return Py_DECREF(none), py::bool_(true);
}

py::object bind_write(py::object k, py::object v, py::object k_scale, py::object v_scale, py::object calibration,
    py::object cos, py::object sin, bool interleaved) {
    py::object capsule = new_binding({k, v, k_scale, v_scale, calibration, cos, sin});
    if (!capsule) return py::none();
    Binding& b = binding_of(capsule);
    b.write_k = write_into(b, BOUND_K, BOUND_K_SCALE), b.write_v = write_into(b, BOUND_V, BOUND_V_SCALE);
    b.write_k.half = b.tensors[BOUND_COS].shape[1], b.write_k.interleaved = interleaved;
    b.write_k.cos = view_of(b.tensors[BOUND_COS]), b.write_k.sin = view_of(b.tensors[BOUND_SIN]);
    return capsule;
}

Tensor checked(py::handle x) {
    Tensor t;
    if (x.is_none() || !read_tensor(x.ptr(), t, true)) throw py::type_error("this is no tensor of a checked call");
    return t;
}

void copy_between(const Tensor& frames, const Tensor& pairs, int threads) {
    int64_t bytes = frames.bits / 8, step = view_of(frames).stride[0], pair = view_of(pairs).stride[0];
    for (int i = 1; i < frames.dims; i++) bytes *= frames.shape[i];
    py::gil_scoped_release released;
    run_copies(frames.data, step, bytes, pairs.data, pair, pairs.shape[0], threads);
}

void copy(py::handle storage, py::handle copies, int threads) {
    copy_between(checked(storage), checked(copies), threads);
}

// The rules of checks.copies in pagedkv/kernels/checks.py, for frames that are a row of bytes each.
bool can_be_copied(const Tensor& frames, const Tensor& pairs) {
    if (frames.dims != 2 || frames.code != 1 || frames.bits != 8 || frames.device_type != CPU_DEVICE) return false;
    if (!has_unit_stride(frames) || frames.strides[0] < frames.shape[1]) return false;
    if (pairs.code != 0 || pairs.bits != 32 || pairs.dims != 2 || !is_beside(pairs, frames)) return false;
    if (pairs.shape[1] != 2 || pairs.strides[1] != 1) return false;
    for (int64_t i = 0; i < pairs.shape[0]; i++) {
        const int32_t* pair = reinterpret_cast<const int32_t*>(pairs.data) + i * pairs.strides[0];
        for (int32_t frame : {pair[0], pair[1]})
            if (frame < 0 || frame >= frames.shape[0]) return false;
    }
    return true;
}

py::object copy_at_once(PyObject* const* x) {
    Tensor frames, pairs;
    if (names_a_kernel() || is_observed(x, 2)) return py::none();
    if (!read_tensor(x[0], frames, false) || !read_tensor(x[1], pairs, false)) return py::none();
    if (!can_be_copied(frames, pairs)) return py::none();
    copy_between(frames, pairs, threads_of(Server{}));
    return py::bool_(true);
}

Tensor checked_or_none(py::handle x) { return x.is_none() ? Tensor{} : checked(x); }

// Whether the results are larger than a cache, and each vector of them is whole lines.
bool is_streamed(const Tensor& out, const View& view, int64_t bytes) {
    int64_t bits = reinterpret_cast<intptr_t>(out.data) | view.stride[0] | view.stride[1] | view.stride[2];
    return bytes >= STREAMED_BYTES && (bits | out.shape[out.dims - 1] * out.bits / 8) % 64 == 0;
}

void gather(py::handle k, py::handle v, py::handle k_scale, py::handle v_scale, py::handle calibration,
    py::handle block_table, py::handle rows, py::handle seq_lens, py::handle first, py::handle starts, py::handle k_out,
    py::handle v_out, const std::string& isa, int threads) {
    Tensor pools[] = {checked(k), checked(v)}, outs[] = {checked(k_out), checked(v_out)};
    Tensor scales[] = {checked_or_none(k_scale), checked_or_none(v_scale)};
    Tensor lens = checked(seq_lens), positions = checked(first), statistics = checked_or_none(calibration);
    Tensor table = checked(block_table), table_rows = checked_or_none(rows), ends = checked_or_none(starts);
    const Isa& set = isa_of(isa);
    py::gil_scoped_release released;
    for (bool is_value : {false, true}) {
        const Tensor &from = pools[is_value], &into = outs[is_value], &scale = scales[is_value];
        bool is_packed = into.dims == 3;
        Gather g{};
        g.kv_type = stored_type(from, is_value), g.out_type = dtype_of(into);
        g.rotated = stored_type(pools[1], true) == Dtype::c4, g.scale_per_token_head = scale.dims == 3;
        g.B = lens.shape[0], g.K = from.shape[2], g.D = stored_dim(from, is_value), g.S = from.shape[1];
        g.L = is_packed ? 0 : into.shape[1];
        g.pool = view_of(from), g.scale = view_of(scale), g.out = view_of(into);
        if (!is_value) g.calibration = view_of(statistics);
        if (is_packed) g.out.stride[2] = g.out.stride[1], g.out.stride[1] = g.out.stride[0], g.out.stride[0] = 0;
        g.table = view_of(table), g.rows = view_of(table_rows);
        g.seq_lens = reinterpret_cast<const int32_t*>(lens.data);
        g.first = reinterpret_cast<const int32_t*>(positions.data);
        g.starts = reinterpret_cast<const int64_t*>(ends.data);
        int64_t count = is_packed ? g.starts[g.B] : g.B * g.L;
        g.streams = is_streamed(into, g.out, count * g.K * g.D * into.bits / 8);
        run_gather(set, g, count, threads);
    }
}

void merge_into(const Tensor* t, const Tensor& out, const Tensor& lse, const Isa& set, int threads) {
    States s{dtype_of(t[0]), t[0].shape[0], t[0].shape[1], t[0].shape[2], view_of(t[0]), view_of(t[1]),
             view_of(t[2]), view_of(t[3]), out.data, lse.data};
    py::gil_scoped_release released;
    run_merge(set, s, threads);
}

void merge(py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b, py::handle out, py::handle lse,
    const std::string& isa, int threads) {
    Tensor states[] = {checked(out_a), checked(lse_a), checked(out_b), checked(lse_b)};
    merge_into(states, checked(out), checked(lse), isa_of(isa), threads);
}

py::object merge_at_once(PyObject* const* x) {
    Tensor t[4], made_out, made_lse;
    if (names_a_kernel() || is_observed(x, 4)) return py::none();
    for (int i = 0; i < 4; i++)
        if (!read_tensor(x[i], t[i], false)) return py::none();
    Sizes sizes;
    bool is_served = t[0].device_type == CPU_DEVICE && t[0].bits <= 32;
    if (!is_served || !keeps_rules(MERGE, t, 4, nullptr, t[0], sizes)) return py::none();
    const int64_t* shape = t[0].shape;
    py::object out = new_tensor(x[0], py::make_tuple(shape[0], shape[1], shape[2]), false);
    py::object lse = new_tensor(x[1], py::make_tuple(shape[0], shape[1]), false);
    if (!read_tensor(out.ptr(), made_out, false) || !read_tensor(lse.ptr(), made_lse, false)) return py::none();
    merge_into(t, made_out, made_lse, best_isa(), threads_of(Server{}));
    return py::make_tuple(out, lse);
}

// sums: the address of 16 bytes for each run, which then has at least 241; 0 for none.
void copy_runs(uintptr_t targets, uintptr_t sources, int64_t count, int64_t bytes, uintptr_t sums, double seconds) {
    Copy copy(reinterpret_cast<char* const*>(targets), reinterpret_cast<const char* const*>(sources), count, bytes,
        reinterpret_cast<char*>(sums));
    py::gil_scoped_release released;
    copy_spread(copy, seconds);
}

}  // namespace

void define_moves(py::module_& m) {
    m.def("bind_write", bind_write, "Bind a checked layer and rope; None if the operator must serve.");
    m.def("copy", copy, "Copy between frames that are one run of bytes each: a checked call.");
    define_fast<merge_at_once, 4>(m, "merge_at_once", "Merge two states: out and LSE, or None.");
    define_fast<copy_at_once, 2>(m, "copy_at_once", "Copy frames: True, or None.");
    m.def("copy_runs", copy_runs, "Copy `count` runs of `bytes` between two rows of addresses, and sum them.");
    m.def("gather", gather, "Copy the vectors of sequences out of their pages: a checked call.");
    m.def("merge", merge, "Store out and LSE of two checked states.");
    define_fast<write, 2 + NUM_WRITE>(m, "write", "Store: True, the kind that has no kernel yet, or None.");
}

}  // namespace pagedkv
