// See binding.hpp.
#include "binding.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace pagedkv {
namespace {

PyObject *observers = nullptr, *num_threads = nullptr, *grad_enabled = nullptr;

// The truth of an answer, which is released. True also if there is none: then the call takes the operator.
bool is_true(PyObject* answer) {
    int truth = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (truth < 0) PyErr_Clear();
    return truth != 0;
}

bool is_tensor(PyObject* x) { return x && x != Py_None; }

bool requires_grad(PyObject* x) {
    static PyObject* const name = PyUnicode_InternFromString("requires_grad");
    return is_tensor(x) && is_true(PyObject_GetAttr(x, name));
}

bool is_negative(PyObject* x) {
    static PyObject* const name = PyUnicode_InternFromString("is_neg");
    return is_tensor(x) && is_true(PyObject_CallMethodNoArgs(x, name));
}

void register_torch(py::object type, bool by_table, py::object threads, py::object gradients, py::tuple observing) {
    register_tensor_type(type.ptr(), by_table);
    num_threads = threads.release().ptr(), grad_enabled = gradients.release().ptr();
    observers = observing.release().ptr();
}

void set_kernel(py::object binding, int64_t kind, const std::string& isa, int threads, py::object serve) {
    bool is_ours = serve.is_none();
    Server server{kind, is_ours ? &isa_of(isa) : nullptr, threads, is_ours ? py::object() : serve};
    std::swap(binding_of(binding).server, server);  // the old one may run any code when it goes: only now
}

constexpr const char* SIZES[] = {"T", "H", "K", "D", "Dv", "B", "B+1", "A", "P", "max_seqlen_q"};
std::vector<Rule> contract[NUM_OPERATIONS];

using Names = std::vector<std::string>;
void set_contract(int operation, const std::vector<std::tuple<int, Names, Names, bool, bool, bool>>& given) {
    std::vector<Rule> rules;
    for (const auto& [at, dtypes, sizes, is_optional, has_rows, is_written] : given) {
        Rule r{at, 0, static_cast<int>(sizes.size()), {}, {}, is_optional, has_rows, is_written};
        for (const std::string& dtype : dtypes) r.kinds |= kind_named(dtype);
        for (int i = 0; i < r.dims; i++) {
            r.at_least[i] = sizes[i].rfind(">=", 0) == 0;
            r.sizes[i] = std::find(SIZES, std::end(SIZES), sizes[i].substr(r.at_least[i] ? 2 : 0)) - SIZES;
            if (r.sizes[i] == NUM_SIZES) throw py::value_error("there is no size " + sizes[i]);
        }
        rules.push_back(r);
    }
    contract[operation] = rules;
}

constexpr const char* CHOICES[] = {"PAGEDKV_KERNELS", "PAGEDKV_CPU_ISA", "PAGEDKV_NUM_THREADS"};

// The variables that decide which kernel serves a call, unread: a key for what was chosen. os.environ takes a
// microsecond for each.
py::object kernel_choices(PyObject* const*) {
    py::tuple found(3);
    int i = 0;
    for (const char* name : CHOICES) {
        const char* text = std::getenv(name);
        found[i++] = text ? py::object(py::bytes(text)) : py::object(py::none());
    }
    return found;
}

// True if PAGEDKV_DEBUG asks for checks of values, or if a mode, a transform, a trace or the profiler is active.
bool is_watched() {
    const char* level = std::getenv("PAGEDKV_DEBUG");
    if (!observers || (level && std::strcmp(level, "0"))) return true;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(observers); i++)
        if (is_true(PyObject_CallNoArgs(PyTuple_GET_ITEM(observers, i)))) return true;
    return false;
}

}  // namespace

bool keeps_rules(Operation operation, const Tensor* arguments, int count, const Tensor* bound, const Tensor& on,
    Sizes& sizes) {
    for (const Rule& r : contract[operation]) {
        const Tensor& t = r.at < count ? arguments[r.at] : bound[r.at - count];
        if (!t.is_given && r.is_optional) continue;
        uint64_t kinds = r.kinds ? r.kinds : kind_of(*arguments);
        if (t.dims != r.dims || !is_beside(t, on) || !(kind_of(t) & kinds)) return false;
        for (int i = 0; i < r.dims; i++) {
            int64_t& size = sizes.of[r.sizes[i]];
            if (size < 0) size = t.shape[i];
            if (r.at_least[i] ? t.shape[i] < size : t.shape[i] != size) return false;
            if (r.sizes[i] == OF_B) sizes.of[OF_B_1] = size + 1;
        }
        if ((r.has_rows && !has_unit_stride(t)) || (r.is_written && !has_own_elements(t))) return false;
    }
    return !contract[operation].empty();
}

Binding& binding_of(py::handle capsule) {
    void* binding = PyCapsule_GetPointer(capsule.ptr(), nullptr);
    if (!binding) throw py::error_already_set();
    return *static_cast<Binding*>(binding);
}

py::object new_binding(const py::object (&tensors)[NUM_BOUND]) {
    auto b = std::make_unique<Binding>();
    for (int i = 0; i < NUM_BOUND; i++) {
        Tensor& t = b->tensors[i];
        bool is_pool = i == BOUND_K || i == BOUND_V;
        if (!read_tensor(tensors[i].ptr(), t, true) || (is_pool && t.dims != 4)) return {};
        if (t.is_given && !is_beside(t, b->tensors[BOUND_K])) return {};
        b->objects[i] = tensors[i];
    }
    return py::capsule(b.release(), [](void* binding) { delete static_cast<Binding*>(binding); });
}

bool is_observed(const Binding& b, PyObject* first, PyObject* second) {
    if (is_watched() || is_negative(first) || is_negative(second)) return true;
    if (!is_true(PyObject_CallNoArgs(grad_enabled))) return false;
    for (const py::object& tensor : b.objects)
        if (requires_grad(tensor.ptr())) return true;
    return requires_grad(first) || requires_grad(second);
}

bool is_observed(PyObject* const* tensors, int count) {
    if (is_watched() || std::any_of(tensors, tensors + count, is_negative)) return true;
    return is_true(PyObject_CallNoArgs(grad_enabled)) && std::any_of(tensors, tensors + count, requires_grad);
}

bool names_a_kernel() { return std::any_of(std::begin(CHOICES), std::end(CHOICES), std::getenv); }

py::object new_tensor(PyObject* like, py::object shape, bool is_float32) {
    static PyObject* const new_empty = PyUnicode_InternFromString("new_empty");
    static PyObject* const dtype = py::make_tuple("dtype").release().ptr();
    static PyObject* const float32 = py::object(py::module_::import("torch").attr("float32")).release().ptr();
    PyObject* arguments[] = {like, shape.ptr(), float32};
    PyObject* made = PyObject_VectorcallMethod(new_empty, arguments, 2, is_float32 ? dtype : nullptr);
    if (!made) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
}

void prefetch(const Binding& b, PyObject* const* arguments, int count) {
    const char* lines = reinterpret_cast<const char*>(&b);
    for (size_t at = 0; at < sizeof b; at += 64) __builtin_prefetch(lines + at);
    for (int i = 0; i < count; i++) __builtin_prefetch(arguments[i]);
    for (const py::object& tensor : b.objects) __builtin_prefetch(tensor.ptr());
}

bool is_unchanged(const Binding& b) {
    Tensor now;
    for (int i = 0; i < NUM_BOUND; i++)
        if (!read_tensor(b.objects[i].ptr(), now, false) || std::memcmp(&now, &b.tensors[i], sizeof now)) return false;
    return true;
}

int threads_of(const Server& server) {
    if (server.threads) return server.threads;
    return py::cast<int>(py::reinterpret_borrow<py::object>(num_threads)());
}

bool read_integer(PyObject* x, int64_t& to) {
    int overflow = 1;
    if (PyLong_CheckExact(x)) to = PyLong_AsLongLongAndOverflow(x, &overflow);
    return !overflow;
}

void define_bindings(py::module_& m) {
    m.def("register_torch", register_torch,
        "Register torch.Tensor, how to read one, and torch's functions: threads, gradients, observers of operators.");
    m.def("set_contract", set_contract, "Set the rules of an operation: see pagedkv/kernels/checks.py.");
    define_fast<kernel_choices, 0>(m, "kernel_choices", "The variables that choose a kernel, as bytes or None.");
    m.def("set_kernel", set_kernel, "Set the kernel that serves calls of a kind: an instruction set, or a callable.");
}

}  // namespace pagedkv
