// See kernels/calls.h. The text is a sequence of words:
//   buffers N, then for each operator: its name, overload ("-": none), its inputs, its outputs, its arguments, what to let go
//   of afterwards; at the end the writes. compiler/calls.py is the only writer.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/calls.h"

namespace tilework {
namespace {

struct Argument {
  char kind;                     // of compiler/calls.py
  int64_t number = 0;            // an integer, or which input
  double real = 0;
  std::string text;
  std::vector<Argument> items;   // of a list
};

struct Operator {
  c10::OperatorHandle handle;
  std::vector<int64_t> inputs, outputs, finished;  // slots; an output of -1 is not wanted
  std::vector<Argument> arguments;
  std::vector<c10::IValue> results;
};

struct Write {
  int64_t buffer, slot;
  bool copied;  // the value is a view of a buffer that changes: copied before anything is written
};

Argument read_argument(std::istream& in) {
  std::string word;
  in >> word;
  Argument a{word.at(0)};
  const std::string rest = word.substr(1);
  switch (a.kind) {
    case 'f': a.real = std::strtod(rest.c_str(), nullptr); break;
    case 'c': {  // complex
      std::string imaginary;
      in >> imaginary;
      a.real = std::strtod(rest.c_str(), nullptr);
      a.items.push_back({'f', 0, std::strtod(imaginary.c_str(), nullptr)});
      break;
    }
    case 's': {
      a.text.resize(std::stoll(rest));
      in.get();  // one space
      in.read(a.text.data(), a.text.size());
      break;
    }
    case 'w': a.items.push_back(read_argument(in)); break;
    case 'I': case 'F': case 'B': case 'T': case 'O':
      for (int64_t n = std::stoll(rest); n > 0; --n) a.items.push_back(read_argument(in));
      break;
    case '_': case 'D': break;
    default: a.number = std::stoll(rest);
  }
  return a;
}

std::vector<int64_t> read_numbers(std::istream& in) {
  int64_t count = 0;
  in >> count;
  std::vector<int64_t> found(count);
  for (int64_t& n : found) in >> n;
  return found;
}

template <class Input>
c10::IValue value(const Argument& a, const Input& input) {
  switch (a.kind) {
    case '_': return c10::IValue();
    case 't': return input(a.number);
    case 'i': return a.number;
    case 'f': return a.real;
    case 'c': return c10::complex<double>(a.real, a.items[0].real);
    case 'b': return a.number != 0;
    case 's': return a.text;
    case 'D': return c10::Device(c10::kCPU);
    case 'w': {  // a number where a tensor is expected
      at::Tensor number = c10::scalar_to_tensor(value(a.items[0], input).toScalar());
      number.unsafeGetTensorImpl()->set_wrapped_number(true);
      return number;
    }
    case 'I': {
      c10::List<int64_t> list;
      for (const Argument& item : a.items) list.push_back(item.number);
      return list;
    }
    case 'F': {
      c10::List<double> list;
      for (const Argument& item : a.items) list.push_back(item.real);
      return list;
    }
    case 'B': {
      c10::List<bool> list;
      for (const Argument& item : a.items) list.push_back(item.number != 0);
      return list;
    }
    case 'T': {
      c10::List<at::Tensor> list;
      for (const Argument& item : a.items) list.push_back(input(item.number).toTensor());
      return list;
    }
    case 'O': {
      c10::List<std::optional<at::Tensor>> list;
      for (const Argument& item : a.items)
        list.push_back(item.kind == '_' ? std::optional<at::Tensor>() : std::optional<at::Tensor>(input(item.number).toTensor()));
      return list;
    }
  }
  throw std::runtime_error("calls: no such argument");
}

// Whatever the calling thread has switched on (autograd, autocast, modes of Python) is not for us.
struct Plain {
  c10::impl::ExcludeDispatchKeyGuard keys{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::PreDispatch}) |
      c10::autocast_dispatch_keyset};
  at::NoGradGuard gradients;
};

at::Tensor& tensor(AtenTensorHandle handle) { return *reinterpret_cast<at::Tensor*>(handle); }

}  // namespace

struct Calls {
  int64_t num_buffers = 0, num_slots = 0;
  std::vector<Operator> operators;
  std::vector<Write> writes;
  std::vector<c10::IValue> slots;
};

Calls* open_calls(const char* text) {
  std::istringstream in(text);
  auto* calls = new Calls;
  int64_t count = 0;
  in >> calls->num_buffers >> calls->num_slots >> count;
  for (int64_t i = 0; i < count; ++i) {
    std::string name, overload;
    in >> name >> overload;
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload == "-" ? "" : overload.c_str());
    Operator op{handle, read_numbers(in), read_numbers(in), read_numbers(in)};
    int64_t num_arguments = 0;
    in >> num_arguments;
    for (int64_t k = 0; k < num_arguments; ++k) op.arguments.push_back(read_argument(in));
    calls->operators.push_back(std::move(op));
  }
  in >> count;
  for (int64_t i = 0; i < count; ++i) {
    Write w{};
    in >> w.buffer >> w.slot >> w.copied;
    calls->writes.push_back(w);
  }
  if (!in) throw std::runtime_error("calls: the text ends too early");
  calls->slots.resize(calls->num_slots);
  return calls;
}

template <class Input>
static void perform(Operator& op, const Input& input) {
  std::vector<c10::IValue> stack;
  stack.reserve(op.arguments.size());
  for (const Argument& a : op.arguments) stack.push_back(value(a, input));
  op.handle.callBoxed(&stack);
  op.results = std::move(stack);
  if (op.results.size() == 1 && op.results[0].isTensorList()) {  // several results all the same
    const auto list = op.results[0].toTensorVector();
    op.results.assign(list.begin(), list.end());
  }
}

void run_calls(Calls* calls, AtenTensorHandle* buffers) {
  Plain plain;
  std::vector<c10::IValue>& slots = calls->slots;
  for (int64_t i = 0; i < calls->num_buffers; ++i) slots[i] = tensor(buffers[i]);
  for (Operator& op : calls->operators) {
    perform(op, [&](int64_t k) -> const c10::IValue& { return slots[op.inputs[k]]; });
    for (size_t k = 0; k < op.outputs.size(); ++k)
      if (op.outputs[k] >= 0) slots[op.outputs[k]] = op.results.at(k);
    op.results.clear();
    for (int64_t slot : op.finished) slots[slot] = c10::IValue();
  }
  for (const Write& w : calls->writes)
    if (w.copied) slots[w.slot] = slots[w.slot].toTensor().clone();
  for (const Write& w : calls->writes) tensor(buffers[w.buffer]).copy_(slots[w.slot].toTensor());
  for (c10::IValue& slot : slots) slot = c10::IValue();
}

void call(Calls* calls, int index, const AtenTensorHandle* inputs, int output, AtenTensorHandle out) {
  Plain plain;
  Operator& op = calls->operators.at(index);
  perform(op, [&](int64_t k) { return c10::IValue(tensor(inputs[k])); });
  tensor(out).copy_(op.results.at(output).toTensor());
}

void result(Calls* calls, int index, int output, AtenTensorHandle out) {
  Plain plain;
  tensor(out).copy_(calls->operators.at(index).results.at(output).toTensor());
}

}  // namespace tilework
