#include "jit/lowering.h"

#include <mutex>
#include <stdexcept>

#include "llvm/IR/LLVMContext.h"
#include "llvm/IR/LegacyPassManager.h"
#include "llvm/IR/Module.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Target/TargetMachine.h"
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

// Without the "builtin.module(...)" anchor: parsePassPipeline(text, pm) would nest it and run nothing. The emitters
// repeat constants and addresses; once `cse` has merged them, `canonicalize` takes a fraction of the time, to the same
// code.
const char* const kPipeline =
    "cse,canonicalize,convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,convert-arith-to-llvm,"
    "convert-ub-to-llvm,convert-func-to-llvm,convert-cf-to-llvm,reconcile-unrealized-casts,canonicalize,cse";

namespace {

void register_passes() {
  static std::once_flag once;
  std::call_once(once, [] {
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

mlir::DialectRegistry make_dialects() {
  mlir::DialectRegistry dialects;
  dialects.insert<mlir::func::FuncDialect, mlir::arith::ArithDialect, mlir::math::MathDialect, mlir::scf::SCFDialect,
                  mlir::cf::ControlFlowDialect, mlir::vector::VectorDialect, mlir::LLVM::LLVMDialect,
                  mlir::ub::UBDialect>();
  mlir::registerBuiltinDialectTranslation(dialects);
  mlir::registerLLVMDialectTranslation(dialects);
  return dialects;
}

}  // namespace

std::unique_ptr<llvm::Module> lower(const std::string& source, const llvm::TargetMachine& machine,
                                    llvm::LLVMContext& llvm_context) {
  register_passes();
  static const mlir::DialectRegistry dialects = make_dialects();
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
  llvm_module->setDataLayout(machine.createDataLayout());
  llvm_module->setTargetTriple(machine.getTargetTriple());
  return llvm_module;
}

void optimise(llvm::Module& module, llvm::TargetMachine& machine) {
  llvm::LoopAnalysisManager loops;
  llvm::FunctionAnalysisManager functions;
  llvm::CGSCCAnalysisManager graphs;
  llvm::ModuleAnalysisManager modules;
  llvm::PipelineTuningOptions tuning;
  tuning.LoopVectorization = false;  // kernels are already vectorized
  tuning.SLPVectorization = false;
  llvm::PassBuilder builder(&machine, tuning);
  builder.registerModuleAnalyses(modules);
  builder.registerCGSCCAnalyses(graphs);
  builder.registerFunctionAnalyses(functions);
  builder.registerLoopAnalyses(loops);
  builder.crossRegisterProxies(loops, functions, graphs, modules);
  builder.buildPerModuleDefaultPipeline(llvm::OptimizationLevel::O3).run(module, modules);
}

std::string print_assembly(llvm::Module& module, llvm::TargetMachine& machine) {
  llvm::SmallVector<char, 0> text;
  llvm::raw_svector_ostream stream(text);
  llvm::legacy::PassManager passes;
  if (machine.addPassesToEmitFile(passes, stream, nullptr, llvm::CodeGenFileType::AssemblyFile))
    throw std::runtime_error("LLVM cannot print assembly for this target");
  passes.run(module);
  return {text.begin(), text.end()};
}

}  // namespace quire
