#include "jit/jit.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <mutex>
#include <stdexcept>

#include "jit/lowering.h"
#include "llvm/ExecutionEngine/Orc/CompileUtils.h"
#include "llvm/ExecutionEngine/Orc/LLJIT.h"
#include "llvm/IR/LLVMContext.h"
#include "llvm/IR/LegacyPassManager.h"
#include "llvm/IR/Module.h"
#include "llvm/MC/MCSubtargetInfo.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/TargetParser/Host.h"

namespace quire {
namespace {

template <typename T>
T unwrap(llvm::Expected<T> value, const char* what) {
  if (!value) throw std::runtime_error(std::string(what) + ": " + llvm::toString(value.takeError()));
  return static_cast<T&&>(*value);
}

// Part of the cache's key: how machine code is generated, apart from the target.
constexpr const char* kCodeGeneration = "aggressive, small, pic, strict";

llvm::orc::JITTargetMachineBuilder machine_builder(const Target& target) {
  llvm::orc::JITTargetMachineBuilder builder{llvm::Triple(llvm::sys::getProcessTriple())};
  builder.setCPU(target.cpu);
  llvm::SmallVector<llvm::StringRef> features;
  llvm::StringRef(target.features).split(features, ',', -1, false);
  for (llvm::StringRef feature : features) builder.addFeatures({feature.str()});
  builder.setCodeGenOptLevel(llvm::CodeGenOptLevel::Aggressive);
  builder.setCodeModel(llvm::CodeModel::Small);   // ORC's default, Large, loads every constant through a movabs
  builder.setRelocationModel(llvm::Reloc::PIC_);  // JIT memory lies beyond the addresses of 32 bits
  // Only the FMAs that a kernel requests: contracting mul + add would change bits between instruction sets.
  builder.getOptions().AllowFPOpFusion = llvm::FPOpFusion::Strict;
  return builder;
}

/// LLVM ends the process when it is to generate code for a CPU that it does not know.
void check_target(const llvm::TargetMachine& machine, const Target& target) {
  const llvm::MCSubtargetInfo& cpu = *machine.getMCSubtargetInfo();
  const bool has_64_bits = !machine.getTargetTriple().isX86() || cpu.checkFeatures("+64bit");
  if (target.vector_bits < 0 || !cpu.isCPUStringValid(target.cpu) || !has_64_bits)
    throw std::invalid_argument("the target of cpu='" + target.cpu + "', features='" + target.features +
                                "', vector_bits=" + std::to_string(target.vector_bits) +
                                " is none that LLVM can generate 64-bit code for");
}

}  // namespace

struct Jit::Impl {
  llvm::orc::JITTargetMachineBuilder builder;
  std::unique_ptr<llvm::orc::LLJIT> jit;
  std::atomic<int> libraries = 0;

  explicit Impl(const Target& target) : builder(machine_builder(target)) {
    check_target(*machine(), target);
    jit = unwrap(llvm::orc::LLJITBuilder().setJITTargetMachineBuilder(builder).create(), "LLVM's JIT failed to start");
    jit->getMainJITDylib().addGenerator(
        unwrap(llvm::orc::DynamicLibrarySearchGenerator::GetForCurrentProcess(jit->getDataLayout().getGlobalPrefix()),
               "symbols of this process"));
  }

  /// Returns what generates code, for one thread.
  std::unique_ptr<llvm::TargetMachine> machine() {
    return unwrap(builder.createTargetMachine(), "no LLVM target machine");
  }

  /// Returns the LLVM IR of a kernel, ready for code generation.
  static std::unique_ptr<llvm::Module> lower(const std::string& source, const Target& target,
                                             llvm::TargetMachine& machine, llvm::LLVMContext& context) {
    auto module = quire::lower(source, machine, context);
    for (auto& function : *module) {
      if (function.isDeclaration()) continue;
      function.addFnAttr("target-cpu", target.cpu);
      function.addFnAttr("target-features", machine.getTargetFeatureString());
      function.addFnAttr("prefer-vector-width", std::to_string(target.vector_bits));
      function.addFnAttr(llvm::Attribute::NoUnwind);
    }
    optimise(*module, machine);
    return module;
  }
};

std::vector<std::string> host_features() {
  std::vector<std::string> names;
#if defined(__aarch64__)  // LLVM reads /proc/cpuinfo, which emulators and containers show of another machine
  const unsigned long granted = getauxval(AT_HWCAP);
  if (granted & HWCAP_ASIMD) names.emplace_back("neon");
  if (granted & HWCAP_ASIMDDP) names.emplace_back("dotprod");
#else
  for (const auto& feature : llvm::sys::getHostCPUFeatures())
    if (feature.getValue()) names.push_back(feature.getKey().str());
#endif
  return names;
}

std::string llvm_version() { return LLVM_VERSION_STRING; }

Jit::Jit(Target target, std::filesystem::path cache_dir) : target_(std::move(target)), cache_(std::move(cache_dir)) {
  static std::once_flag once;
  std::call_once(once, [] {
    llvm::InitializeNativeTarget();
    llvm::InitializeNativeTargetAsmPrinter();
  });
  impl_ = std::make_unique<Impl>(target_);
}

Jit::~Jit() = default;

std::vector<std::uintptr_t> Jit::compile(const std::string& source, const std::vector<std::string>& symbols) {
  const std::string object =
      cache_.get({source, kPipeline, kCodeGeneration, target_.cpu, target_.features,
                  std::to_string(target_.vector_bits), llvm_version()},
                 ".o", [&] {
                   llvm::LLVMContext context;
                   const auto machine = impl_->machine();
                   auto module = Impl::lower(source, target_, *machine, context);
                   llvm::orc::SimpleCompiler compiler(*machine);
                   return unwrap(compiler(*module), "LLVM code generation failed")->getBuffer().str();
                 });
  auto& library = unwrap(impl_->jit->createJITDylib("kernels." + std::to_string(impl_->libraries++)), "JIT library");
  library.addToLinkOrder(impl_->jit->getMainJITDylib());
  if (auto error = impl_->jit->addObjectFile(library, llvm::MemoryBuffer::getMemBufferCopy(object)))
    throw std::runtime_error("the object failed to link: " + llvm::toString(std::move(error)));
  std::vector<std::uintptr_t> addresses;
  for (const std::string& symbol : symbols)
    addresses.push_back(unwrap(impl_->jit->lookup(library, symbol), symbol.c_str()).getValue());
  return addresses;
}

std::string Jit::assembly(const std::string& source) const {
  llvm::LLVMContext context;
  const auto machine = impl_->machine();
  auto module = Impl::lower(source, target_, *machine, context);
  return print_assembly(*module, *machine);
}

}  // namespace quire
