#include "jit/jit.h"

#include <unistd.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <atomic>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "llvm/ADT/StringExtras.h"
#include "llvm/ExecutionEngine/Orc/CompileUtils.h"
#include "llvm/ExecutionEngine/Orc/LLJIT.h"
#include "llvm/IR/LLVMContext.h"
#include "llvm/IR/LegacyPassManager.h"
#include "llvm/IR/Module.h"
#include "llvm/MC/MCSubtargetInfo.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/SHA256.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/TargetParser/Host.h"
#include "mlir/Conversion/ArithToLLVM/ArithToLLVM.h"
#include "mlir/Conversion/ControlFlowToLLVM/ControlFlowToLLVM.h"
#include "mlir/Conversion/Passes.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/ControlFlow/IR/ControlFlow.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/UB/IR/UBOps.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/IR/MLIRContext.h"
#include "mlir/Parser/Parser.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Pass/PassRegistry.h"
#include "mlir/Target/LLVMIR/Dialect/Builtin/BuiltinToLLVMIRTranslation.h"
#include "mlir/Target/LLVMIR/Dialect/LLVMIR/LLVMToLLVMIRTranslation.h"
#include "mlir/Target/LLVMIR/Export.h"
#include "mlir/Transforms/Passes.h"

namespace quire {
namespace {

// Without the "builtin.module(...)" anchor: parsePassPipeline(text, pm) would nest it and run nothing. The emitters
// repeat constants and addresses; once `cse` has merged them, `canonicalize` takes a fraction of the time, to the same
// code.
constexpr const char* kPipeline =
    "cse,canonicalize,convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,convert-arith-to-llvm,"
    "convert-ub-to-llvm,convert-func-to-llvm,convert-cf-to-llvm,reconcile-unrealized-casts,canonicalize,cse";

void register_passes() {
  static std::once_flag once;
  std::call_once(once, [] {
    llvm::InitializeNativeTarget();
    llvm::InitializeNativeTargetAsmPrinter();
    mlir::registerTransformsPasses();
    mlir::registerSCFToControlFlowPass();
    mlir::registerConvertVectorToLLVMPass();
    mlir::registerConvertMathToLLVMPass();
    mlir::registerArithToLLVMConversionPass();
    mlir::registerUBToLLVMConversionPass();
    mlir::registerConvertFuncToLLVMPass();
    mlir::registerConvertControlFlowToLLVMPass();
    mlir::registerReconcileUnrealizedCastsPass();
  });
}

template <typename T>
T unwrap(llvm::Expected<T> value, const char* what) {
  if (!value) throw std::runtime_error(std::string(what) + ": " + llvm::toString(value.takeError()));
  return static_cast<T&&>(*value);
}

llvm::orc::JITTargetMachineBuilder machine_builder(const Target& target) {
  llvm::orc::JITTargetMachineBuilder builder{llvm::Triple(llvm::sys::getProcessTriple())};
  builder.setCPU(target.cpu);
  llvm::SmallVector<llvm::StringRef> features;
  llvm::StringRef(target.features).split(features, ',', -1, false);
  for (llvm::StringRef feature : features) builder.addFeatures({feature.str()});
  builder.setCodeGenOptLevel(llvm::CodeGenOptLevel::Aggressive);
  builder.setCodeModel(llvm::CodeModel::Small);  // ORC's default, Large, loads every constant through a movabs
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

mlir::DialectRegistry make_dialects() {
  mlir::DialectRegistry dialects;
  dialects.insert<mlir::func::FuncDialect, mlir::arith::ArithDialect, mlir::math::MathDialect, mlir::scf::SCFDialect,
                  mlir::cf::ControlFlowDialect, mlir::vector::VectorDialect, mlir::LLVM::LLVMDialect,
                  mlir::ub::UBDialect>();
  mlir::registerBuiltinDialectTranslation(dialects);
  mlir::registerLLVMDialectTranslation(dialects);
  return dialects;
}

constexpr std::string_view kMagic = "quire-object-2\n";
constexpr std::size_t kDigestSize = 64;

std::string digest(std::string_view bytes) {
  auto hash = llvm::SHA256::hash(llvm::ArrayRef(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
  return llvm::toHex(hash, true);
}

/// An entry of the cache: its object, or why it cannot be used; neither if there is no entry.
struct CacheEntry {
  std::optional<std::string> object;
  std::string problem;
};

/// Reads a cache entry: the magic, its key, the digest of the object, the object.
CacheEntry read_cache_entry(const std::filesystem::path& path, std::string_view key) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return {};
  std::string content;
  try {
    content.assign(std::istreambuf_iterator<char>(file), {});
  } catch (const std::ios_base::failure&) {  // a folder, or a disk that fails
    return {{}, "cannot be read"};
  }
  const std::string_view all(content);
  constexpr std::size_t header = kMagic.size() + 2 * kDigestSize;
  if (all.size() < header || !all.starts_with(kMagic)) return {{}, "is truncated or no entry of this cache"};
  if (all.substr(kMagic.size(), kDigestSize) != key) return {{}, "is the entry of another kernel"};
  const std::string_view object = all.substr(header);
  if (all.substr(kMagic.size() + kDigestSize, kDigestSize) != digest(object)) return {{}, "is damaged"};
  return {std::string(object), {}};
}

/// Writes an entry under a private name and renames it, so that readers see a complete entry or none. A folder that is
/// not writable is no error: the cache is only an optimisation.
void write_cache_entry(const std::filesystem::path& path, std::string_view key, std::string_view object) {
  static std::atomic<int> counter{0};
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  auto temporary = path;
  temporary.concat(".").concat(std::to_string(getpid())).concat(".").concat(std::to_string(counter++));
  {
    std::ofstream file(temporary, std::ios::binary);
    file << kMagic << key << digest(object) << object;
    if (!file.flush()) {
      std::filesystem::remove(temporary, error);
      return;
    }
  }
  std::filesystem::rename(temporary, path, error);
  if (error) std::filesystem::remove(temporary, error);
}

}  // namespace

struct Jit::Impl {
  mlir::DialectRegistry dialects = make_dialects();
  std::unique_ptr<llvm::TargetMachine> machine;
  std::unique_ptr<llvm::orc::LLJIT> jit;
  int libraries = 0;

  explicit Impl(const Target& target) {
    auto builder = machine_builder(target);
    machine = unwrap(builder.createTargetMachine(), "no LLVM target machine");
    check_target(*machine, target);
    jit = unwrap(llvm::orc::LLJITBuilder().setJITTargetMachineBuilder(builder).create(), "LLVM's JIT failed to start");
    jit->getMainJITDylib().addGenerator(
        unwrap(llvm::orc::DynamicLibrarySearchGenerator::GetForCurrentProcess(jit->getDataLayout().getGlobalPrefix()),
               "symbols of this process"));
  }

  std::unique_ptr<llvm::Module> lower(const std::string& source, const Target& target, llvm::LLVMContext& llvm_context);
  void optimise(llvm::Module& module);
};

std::unique_ptr<llvm::Module> Jit::Impl::lower(const std::string& source, const Target& target,
                                               llvm::LLVMContext& llvm_context) {
  mlir::MLIRContext context(dialects, mlir::MLIRContext::Threading::DISABLED);
  std::string diagnostics;
  llvm::raw_string_ostream stream(diagnostics);
  mlir::ScopedDiagnosticHandler handler(&context, [&](mlir::Diagnostic& diagnostic) {
    stream << diagnostic.getLocation() << ": " << diagnostic << "\n";
    return mlir::success();
  });
  auto module = mlir::parseSourceString<mlir::ModuleOp>(source, &context);
  if (!module) throw std::runtime_error("MLIR failed to parse: " + diagnostics);
  mlir::PassManager passes(&context);
  if (mlir::failed(mlir::parsePassPipeline(kPipeline, passes, stream)) || mlir::failed(passes.run(*module)))
    throw std::runtime_error("MLIR passes failed: " + diagnostics);
  auto llvm_module = mlir::translateModuleToLLVMIR(*module, llvm_context);
  if (!llvm_module) throw std::runtime_error("MLIR failed to translate to LLVM IR: " + diagnostics);
  llvm_module->setDataLayout(machine->createDataLayout());
  llvm_module->setTargetTriple(machine->getTargetTriple());
  for (auto& function : *llvm_module) {
    if (function.isDeclaration()) continue;
    function.addFnAttr("target-cpu", target.cpu);
    function.addFnAttr("target-features", machine->getTargetFeatureString());
    function.addFnAttr("prefer-vector-width", std::to_string(target.vector_bits));
    function.addFnAttr(llvm::Attribute::NoUnwind);
  }
  return llvm_module;
}

void Jit::Impl::optimise(llvm::Module& module) {
  llvm::LoopAnalysisManager loops;
  llvm::FunctionAnalysisManager functions;
  llvm::CGSCCAnalysisManager graphs;
  llvm::ModuleAnalysisManager modules;
  llvm::PipelineTuningOptions tuning;
  tuning.LoopVectorization = false;  // kernels are already vectorized
  tuning.SLPVectorization = false;
  llvm::PassBuilder builder(machine.get(), tuning);
  builder.registerModuleAnalyses(modules);
  builder.registerCGSCCAnalyses(graphs);
  builder.registerFunctionAnalyses(functions);
  builder.registerLoopAnalyses(loops);
  builder.crossRegisterProxies(loops, functions, graphs, modules);
  builder.buildPerModuleDefaultPipeline(llvm::OptimizationLevel::O3).run(module, modules);
}

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

Jit::Jit(Target target, std::filesystem::path cache_dir)
    : target_(std::move(target)), cache_dir_(std::move(cache_dir)) {
  register_passes();
  impl_ = std::make_unique<Impl>(target_);
}

Jit::~Jit() = default;

std::string Jit::key_of(const std::string& source) const {
  llvm::SHA256 hash;
  for (const std::string& part : {std::string(kMagic), source, std::string(kPipeline), target_.cpu, target_.features,
                                  std::to_string(target_.vector_bits), llvm_version()}) {
    hash.update(part);
    hash.update(llvm::StringRef("\0", 1));
  }
  return llvm::toHex(hash.final(), true);
}

std::vector<std::uintptr_t> Jit::compile(const std::string& source, const std::vector<std::string>& symbols) {
  std::unique_ptr<llvm::MemoryBuffer> object;
  const std::string key = cache_dir_.empty() ? "" : key_of(source);
  const std::filesystem::path path = cache_dir_ / (key + ".o");
  if (!cache_dir_.empty()) {
    const CacheEntry entry = read_cache_entry(path, key);
    if (entry.object) {
      object = llvm::MemoryBuffer::getMemBufferCopy(*entry.object);
      cache_hits_++;
    } else if (!entry.problem.empty()) {
      rejected_.push_back(path.string() + " " + entry.problem);
    }
  }
  if (!object) {
    llvm::LLVMContext context;
    auto module = impl_->lower(source, target_, context);
    impl_->optimise(*module);
    llvm::orc::SimpleCompiler compiler(*impl_->machine);
    object = unwrap(compiler(*module), "LLVM code generation failed");
    compiled_++;
    if (!cache_dir_.empty()) write_cache_entry(path, key, {object->getBufferStart(), object->getBufferSize()});
  }
  auto& library = unwrap(impl_->jit->createJITDylib("kernels." + std::to_string(impl_->libraries++)), "JIT library");
  library.addToLinkOrder(impl_->jit->getMainJITDylib());
  if (auto error = impl_->jit->addObjectFile(library, std::move(object)))
    throw std::runtime_error("the object failed to link: " + llvm::toString(std::move(error)));
  std::vector<std::uintptr_t> addresses;
  for (const std::string& symbol : symbols)
    addresses.push_back(unwrap(impl_->jit->lookup(library, symbol), symbol.c_str()).getValue());
  return addresses;
}

std::string Jit::assembly(const std::string& source) const {
  llvm::LLVMContext context;
  auto module = impl_->lower(source, target_, context);
  impl_->optimise(*module);
  llvm::SmallVector<char, 0> text;
  llvm::raw_svector_ostream stream(text);
  llvm::legacy::PassManager passes;
  if (impl_->machine->addPassesToEmitFile(passes, stream, nullptr, llvm::CodeGenFileType::AssemblyFile))
    throw std::runtime_error("LLVM cannot print assembly for this target");
  passes.run(*module);
  return {text.begin(), text.end()};
}

}  // namespace quire
